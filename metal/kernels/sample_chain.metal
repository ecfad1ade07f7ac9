#include "sample_chain.h"
