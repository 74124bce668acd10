# What looks at all interleavings: test_checker for the algorithms of core/ (checker/comm.h),
# test_interleavings for what the CPU does when an operation fails, test_close for close(). Each also
# meets mutants of the code that it checks, and has to refuse them.
set(CHECKER ${CMAKE_CURRENT_LIST_DIR})
add_library(checker OBJECT ${CHECKER}/../test_checker.cpp ${CHECKER}/comm.cpp ${CHECKER}/fibers.cpp
  ${CHECKER}/link.cpp ${CHECKER}/memory.cpp ${CHECKER}/symbols.cpp ${CHECKER}/world.cpp)
target_include_directories(checker PUBLIC csrc tests/cpp)
add_executable(test_checker ${CHECKER}/algorithms.cpp)
target_link_libraries(test_checker PRIVATE checker)
add_test(NAME checker COMMAND test_checker)
set(QUICKLY_COMPILED -O1 -g1)  # they take longer to compile than to run
target_compile_options(checker PRIVATE ${QUICKLY_COMPILED})
target_compile_options(test_checker PRIVATE ${QUICKLY_COMPILED})

# The calls that ThreadSanitizer puts in go to checker/atomics.cpp.
add_library(scheduler OBJECT ${CHECKER}/atomics.cpp ${CHECKER}/fibers.cpp)
target_include_directories(scheduler PUBLIC tests/cpp)
target_compile_options(scheduler PRIVATE ${QUICKLY_COMPILED})
foreach(source group comm)
  add_library(observed_${source} OBJECT csrc/cpu/${source}.cpp)
  target_compile_options(observed_${source} PRIVATE -fsanitize=thread ${QUICKLY_COMPILED})
  target_link_libraries(observed_${source} PRIVATE pycomm_cpu)
endforeach()
foreach(test interleavings close)
  add_library(${test} OBJECT ${CHECKER}/../test_${test}.cpp)
  target_compile_options(${test} PRIVATE ${QUICKLY_COMPILED})
  target_link_libraries(${test} PUBLIC scheduler pycomm_cpu)
  add_executable(test_${test})
  target_link_libraries(test_${test} PRIVATE ${test} scheduler observed_group observed_comm)
  add_test(NAME ${test} COMMAND test_${test})
endforeach()

# A copy of a file in which some text, which must be there, is another one; it lies in `to`.
function(mutate file to old new)
  set(original ${PROJECT_SOURCE_DIR}/csrc/${file})
  file(READ ${original} text)
  string(FIND "${text}" "${old}" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "csrc/${file} has no text for the mutant ${to}:\n${old}")
  endif()
  string(REPLACE "${old}" "${new}" text "${text}")
  file(GENERATE OUTPUT ${to}/${file} CONTENT "${text}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${original})
endfunction()

function(expect_failure target)
  target_compile_options(${target} PRIVATE -O0 -g0 -w)
  add_test(NAME ${target} COMMAND ${target})
  set_tests_properties(${target} PROPERTIES PASS_REGULAR_EXPRESSION "FAILED" TIMEOUT 60)
endfunction()

# Only the code that includes the header is compiled anew.
function(add_mutant name header old new)
  set(copy ${PROJECT_BINARY_DIR}/mutants/${name})
  mutate(core/${header} ${copy} "${old}" "${new}")
  add_executable(mutant_${name} ${CHECKER}/algorithms.cpp)
  target_include_directories(mutant_${name} BEFORE PRIVATE ${copy})
  target_link_libraries(mutant_${name} PRIVATE checker)
  expect_failure(mutant_${name})
endfunction()

# Of cpu/${source}.cpp, for test_${test}.
function(add_cpu_mutant name source test old new)
  set(copy ${PROJECT_BINARY_DIR}/mutants/${name})
  mutate(cpu/${source}.cpp ${copy} "${old}" "${new}")
  set(others observed_group observed_comm)
  list(REMOVE_ITEM others observed_${source})
  add_executable(mutant_${name} ${copy}/cpu/${source}.cpp)
  target_link_libraries(mutant_${name} PRIVATE ${test} scheduler ${others})
  expect_failure(mutant_${name})
  target_compile_options(mutant_${name} PRIVATE -fsanitize=thread)
endfunction()

include(${CHECKER}/mutants.cmake)
