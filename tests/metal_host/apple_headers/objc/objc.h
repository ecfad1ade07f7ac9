#pragma once
#include <stddef.h>
#include <stdint.h>
typedef struct objc_class* Class;
typedef struct objc_object {
  Class isa;
}* id;
typedef struct objc_selector* SEL;
typedef signed char BOOL_;
typedef bool BOOL;
typedef void (*IMP)(void);
typedef struct objc_method* Method;
typedef struct objc_object Protocol;
