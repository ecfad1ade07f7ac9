#pragma once
#include <stdint.h>
typedef long CFIndex;
typedef double CFTimeInterval;
typedef const void* CFTypeRef;
typedef const struct __CFString* CFStringRef;
