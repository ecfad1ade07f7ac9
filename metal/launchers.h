#pragma once

#include "backend_launchers.h"

MLXCEL_DECLARE_LAUNCHERS(metal)
