# The test build of _ext whose Metal device is emulated: real ops, real metal/*.cpp, real kernels; the stand-in
# for Metal.hpp and for MLX's device; and primitives that take the GPU path on MLX's CPU stream.
set(METAL_HOST ${CMAKE_SOURCE_DIR}/tests/metal_host)
get_target_property(sources _ext SOURCES)
foreach(launcher ${MLXCEL_METAL_HOST})
  get_filename_component(op ${launcher} NAME)
  list(REMOVE_ITEM sources csrc/cpu/${op} ${CMAKE_SOURCE_DIR}/csrc/cpu/${op})
endforeach()
set_property(TARGET _ext PROPERTY SOURCES ${sources} ${METAL_HOST}/fake/device.cpp ${METAL_HOST}/fake/eval.cpp)
target_include_directories(_ext BEFORE PRIVATE ${METAL_HOST}/fake)
set_source_files_properties(
  ${METAL_HOST}/fake/device.cpp TARGET_DIRECTORY _ext
  PROPERTIES COMPILE_DEFINITIONS "METAL_HOST_PYTHON=\"${Python_EXECUTABLE}\";METAL_HOST_ROOT=\"${CMAKE_SOURCE_DIR}\"")
