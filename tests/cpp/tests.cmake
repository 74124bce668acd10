# The C++ tests, for tests/cpp/run.sh, which has the options, and for compile_commands.json.
if(PYCOMM_CUDA)
  message(FATAL_ERROR "PYCOMM_BUILD_TESTS excludes PYCOMM_CUDA: tests compile the kernels as C++")
endif()
set(PYCOMM_SANITIZE "" CACHE STRING "thread, address (with undefined), or nothing")
# Most of the time to compile a file goes into its headers, so ten files can be compiled as one.
option(PYCOMM_UNITED "compile files of a library together" OFF)
set(CMAKE_UNITY_BUILD_BATCH_SIZE 10)

# For what takes longer to compile than to run. GCC's -O1 calls even the operators of iterators.
set(QUICKLY_COMPILED -O1 $<$<CXX_COMPILER_ID:GNU>:-finline-small-functions>)
# Reports need line numbers; more debug information takes a third longer to compile.
set(debugged -g1)
if(PYCOMM_SANITIZE STREQUAL "thread")
  list(APPEND debugged -fsanitize=thread ${QUICKLY_COMPILED})
  add_link_options(-fsanitize=thread)
elseif(PYCOMM_SANITIZE STREQUAL "address")
  list(APPEND debugged -fsanitize=address,undefined -fno-sanitize-recover=all ${QUICKLY_COMPILED})
  add_link_options(-fsanitize=address,undefined)
endif()
add_compile_options(${debugged})

# Tests include headers where they lie. None of this is part of what is installed.
add_library(tested_cpu INTERFACE)
target_include_directories(tested_cpu INTERFACE csrc)
target_link_libraries(tested_cpu INTERFACE pycomm_cpu)
target_compile_options(pycomm_cpu PRIVATE ${debugged})
if(NOT PYCOMM_SANITIZE STREQUAL "")  # without sanitizers, tests have some of the objects replaced
  set_target_properties(pycomm_cpu PROPERTIES UNITY_BUILD ${PYCOMM_UNITED} UNITY_BUILD_BATCH_SIZE 10)
endif()

# What includes torch is setup.py's to build; here it is only listed in compile_commands.json.
set(PYCOMM_PYTHON "" CACHE STRING "a Python with torch and pybind11, or nothing")
if(NOT PYCOMM_PYTHON STREQUAL "")
  execute_process(
    COMMAND ${PYCOMM_PYTHON} -c "import pybind11, sysconfig, torch.utils.cpp_extension as torch; print(\
pybind11.get_include(), sysconfig.get_path('include'), *torch.include_paths(), sep=';', end='')"
    OUTPUT_VARIABLE PYCOMM_PYTHON_INCLUDES COMMAND_ERROR_IS_FATAL ANY)
  file(GLOB PYCOMM_BIND CONFIGURE_DEPENDS csrc/bind/*.cpp)
  add_library(pycomm_bind OBJECT EXCLUDE_FROM_ALL ${PYCOMM_BIND} csrc/cuda/group.cpp
              csrc/cuda/no_cuda.cpp)
  target_include_directories(pycomm_bind PRIVATE csrc)
  target_include_directories(pycomm_bind SYSTEM PRIVATE ${PYCOMM_PYTHON_INCLUDES})
  target_compile_options(pycomm_bind PRIVATE -fPIC -fvisibility=hidden)
  file(GLOB PYCOMM_C10D CONFIGURE_DEPENDS csrc/c10d/*.cpp)
  add_library(pycomm_c10d OBJECT EXCLUDE_FROM_ALL ${PYCOMM_C10D})
  target_include_directories(pycomm_c10d PRIVATE csrc)
  target_include_directories(pycomm_c10d SYSTEM PRIVATE ${PYCOMM_PYTHON_INCLUDES})
  target_compile_definitions(pycomm_c10d PRIVATE TORCH_EXTENSION_NAME=_c10d)
  target_compile_options(pycomm_c10d PRIVATE -fPIC -fvisibility=hidden)
endif()

set(PYCOMM_CPU_TESTS codec collectives compressed fuzz internode memory record waiting layout optim optim_step sharded_step sharded_faults p2p p2p_device p2p_faults)
# A part has one half of these tests under a sanitizer, and the other half without one.
if(NOT "${PYCOMM_PART}" STREQUAL "")
  set(number ${PYCOMM_PART})
  if(PYCOMM_SANITIZE STREQUAL "")
    math(EXPR number "${number} + 1")
  endif()
  foreach(test IN LISTS PYCOMM_CPU_TESTS)
    math(EXPR is_left_out "${number} % 2")
    if(is_left_out)
      list(REMOVE_ITEM PYCOMM_CPU_TESTS ${test})
    endif()
    math(EXPR number "${number} + 1")
  endforeach()
endif()
# Each rank maps the window of a subgroup or a smaller group for itself, and ThreadSanitizer takes two mappings of a page for different memory.
# What an operation costs is counted in operations that others race in.
if(NOT PYCOMM_SANITIZE STREQUAL "thread")
  list(APPEND PYCOMM_CPU_TESTS detach subgroups shrink cost)
endif()

enable_testing()
list(GET PYCOMM_CPU_TESTS 0 first)
foreach(test ${PYCOMM_CPU_TESTS})
  add_executable(test_${test} tests/cpp/cpu/test_${test}.cpp)
  target_include_directories(test_${test} PRIVATE tests/cpp)
  target_link_libraries(test_${test} PRIVATE tested_cpu)
  if(test STREQUAL first)
    target_precompile_headers(test_${test} PRIVATE csrc/cpu/group/group.h)
  else()
    target_precompile_headers(test_${test} REUSE_FROM test_${first})
  endif()
  add_test(NAME ${test} COMMAND test_${test})
endforeach()

# Ranks are fibers, which sanitizers do not follow; and GCC's calls to one of them are put to another use.
if(PYCOMM_SANITIZE STREQUAL "" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  include(tests/cpp/checker/checker.cmake)
endif()

# The kernels, run on the CPU. Their threads are fibers, which sanitizers do not follow by themselves.
if(PYCOMM_SANITIZE STREQUAL "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  include(tests/cpp/race/race.cmake)
endif()
if(PYCOMM_SANITIZE STREQUAL "" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  file(GLOB_RECURSE kernels CONFIGURE_DEPENDS csrc/cuda/*.cu)
  set_source_files_properties(${kernels} PROPERTIES LANGUAGE CXX)
  set(AS_CPP -xc++ "SHELL:-include cuda_runtime.h" -Wno-unknown-pragmas ${QUICKLY_COMPILED})
  add_library(pycomm_device STATIC tests/cpp/device/device.cpp tests/cpp/device/streams.cpp tests/cpp/device/census.cpp tests/cpp/device/unchecked.cpp csrc/cuda/group.cpp ${kernels})
  target_include_directories(pycomm_device BEFORE PUBLIC tests/cpp/device)
  target_compile_options(pycomm_device PRIVATE ${AS_CPP})
  set_target_properties(pycomm_device PROPERTIES UNITY_BUILD ${PYCOMM_UNITED})
  # Its types have members whose types are in an anonymous namespace.
  set_source_files_properties(tests/cpp/device/streams.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  target_link_libraries(pycomm_device PUBLIC tested_cpu)
  set(PYCOMM_DEVICE_TESTS device device_bucket device_departures device_faults device_graphs device_group device_optim device_processes device_sharded device_timing device_topk)
  foreach(test ${PYCOMM_DEVICE_TESTS})
    add_executable(test_${test} tests/cpp/cuda/test_${test}.cpp)
    target_include_directories(test_${test} PRIVATE tests/cpp)
    target_compile_options(test_${test} PRIVATE -Wno-unknown-pragmas)
    target_link_libraries(test_${test} PRIVATE pycomm_device)
    if(test STREQUAL "device")
      target_precompile_headers(test_device PRIVATE tests/cpp/support/device_world.h)
    else()
      target_precompile_headers(test_${test} REUSE_FROM test_device)
    endif()
    add_test(NAME ${test} COMMAND test_${test})
  endforeach()

  # The algorithm and the codec of docs/contributing/extending.md; in the first part.
  set(extending star e4m3)
  if(NOT "${PYCOMM_PART}" STREQUAL "" AND NOT PYCOMM_PART EQUAL 0)
    set(extending "")
  endif()
  foreach(test ${extending})
    set(kernels tests/cpp/extending/${test}.cu)
    set_source_files_properties(${kernels} PROPERTIES LANGUAGE CXX)
    add_executable(test_${test} tests/cpp/extending/test_${test}.cpp ${kernels})
    target_include_directories(test_${test} PRIVATE tests/cpp)
    target_compile_options(test_${test} PRIVATE ${AS_CPP})
    target_link_libraries(test_${test} PRIVATE pycomm_device)
    add_test(NAME ${test} COMMAND test_${test})
  endforeach()

  # pycomm._C with these kernels, and torch's CUDA device in host memory, for tests in Python.
  if(NOT PYCOMM_PYTHON STREQUAL "")
    set(bound ${PYCOMM_BIND})
    if(NOT PYCOMM_OBJECTS STREQUAL "")
      set(bound ${PYCOMM_OBJECTS}/build/bind_1.o ${PYCOMM_OBJECTS}/build/bind_2.o)
    endif()
    add_library(emulator MODULE EXCLUDE_FROM_ALL tests/emulator/device.cpp tests/emulator/operators.cpp ${bound})
    target_include_directories(emulator SYSTEM PRIVATE ${PYCOMM_PYTHON_INCLUDES})
    target_compile_options(emulator PRIVATE ${QUICKLY_COMPILED} -fvisibility=hidden)
    execute_process(COMMAND ${PYCOMM_PYTHON} -c "import torch.utils.cpp_extension as torch; print(*torch.library_paths(), sep=';', end='')"
                    OUTPUT_VARIABLE torch_libraries COMMAND_ERROR_IS_FATAL ANY)
    target_link_directories(emulator PRIVATE ${torch_libraries})
    foreach(function _ZN6pycomm4cuda5Group3runERKNS_4CallEmRKNS0_8ShardingE
            _Z15cudaMemcpyAsyncPvPKvmiP6Stream _Z15cudaEventRecordP5EventP6Stream _Z14cudaEventQueryP5Event)
      target_link_options(emulator PRIVATE LINKER:--wrap=${function})
    endforeach()
    target_link_libraries(emulator PRIVATE pycomm_device c10 torch_cpu torch_python)
    set_target_properties(emulator PROPERTIES PREFIX "" BUILD_RPATH "${torch_libraries}")
  endif()

  # Every kernel must have been launched by one of these tests, if all of them run.
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  set(census ${PROJECT_BINARY_DIR}/census)
  file(MAKE_DIRECTORY ${census})
  foreach(test ${PYCOMM_DEVICE_TESTS})
    set_tests_properties(${test} PROPERTIES ENVIRONMENT PYCOMM_CENSUS=${census}/test_${test}
                         FIXTURES_SETUP census)
    list(APPEND census_tests $<TARGET_FILE:test_${test}>)
  endforeach()
  if("${PYCOMM_PART}" STREQUAL "")
    add_test(NAME device_census COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tests/cpp/device/census.py
             ${CMAKE_NM} ${census} $<TARGET_FILE:pycomm_device> ${census_tests})
    set_tests_properties(device_census PROPERTIES FIXTURES_REQUIRED census)
  endif()
endif()

# The longest ones begin first, so that the last one does not run alone.
foreach(test interleavings device_processes device device_sharded device_bucket compressed optim_step sharded_step)
  if(TEST ${test})
    set_tests_properties(${test} PROPERTIES COST 1000)
  endif()
endforeach()
