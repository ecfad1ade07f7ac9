#pragma once

#include "backend_launchers.h"

// They allocate outputs, declare arrays and call the launchers of launchers.h.
MLXCEL_DECLARE_LAUNCHERS(cuda)
