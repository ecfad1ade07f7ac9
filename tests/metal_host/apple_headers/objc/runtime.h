#pragma once
#include <objc/objc.h>
extern "C" {
Class objc_lookUpClass(const char*);
Protocol* objc_getProtocol(const char*);
SEL sel_registerName(const char*);
Class objc_getClass(const char*);
Class object_getClass(id);
Method class_getInstanceMethod(Class, SEL);
IMP method_getImplementation(Method);
const char* sel_getName(SEL);
bool class_respondsToSelector(Class, SEL);
Class objc_allocateClassPair(Class, const char*, size_t);
void objc_registerClassPair(Class);
bool class_addMethod(Class, SEL, IMP, const char*);
}
