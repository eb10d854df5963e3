# SPDX-License-Identifier: Apache-2.0
# The groups of libdeltarule_mpi: test_mpi_api alone, the others under the launcher of the MPI in use.
function(dr_mpi_group group)
  add_executable(${group} ${group}.c)
  target_include_directories(${group} PRIVATE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/tests
    ${CMOCKA_INCLUDE})
  target_compile_definitions(${group} PRIVATE _GNU_SOURCE)
  target_link_libraries(${group} PRIVATE dr_mpi_static dr_static dr_flags ${CMOCKA_LIBRARY}
    OpenMP::OpenMP_C ${BLAS_LIBRARIES} Threads::Threads m)
endfunction()
function(dr_mpi_test name)
  add_test(NAME ${name} COMMAND ${ARGN})
  # An MPI keeps memory to its end; a machine with fewer cores than ranks needs waiting lanes that sleep.
  set_tests_properties(${name} PROPERTIES TIMEOUT 300 RUN_SERIAL ON
    ENVIRONMENT "OMP_WAIT_POLICY=passive;OMP_NUM_THREADS=1;ASAN_OPTIONS=detect_leaks=0")
endfunction()

dr_mpi_group(test_mpi_api)
add_dependencies(test_mpi_api dr_mpi_shared)
set(flags ${MPI_C_COMPILE_OPTIONS})
foreach(folder ${MPI_C_INCLUDE_DIRS})
  list(APPEND flags -isystem ${folder})
endforeach()
string(REPLACE ";" " " flags "${flags}")
target_compile_definitions(test_mpi_api PRIVATE DR_TEST_ROOT="${CMAKE_SOURCE_DIR}"
  DR_TEST_CC="${CMAKE_C_COMPILER}" DR_TEST_MPI_FLAGS="${flags}" DR_TEST_LIBRARY="$<TARGET_FILE:dr_shared>"
  DR_TEST_MPI_LIBRARY="$<TARGET_FILE:dr_mpi_shared>")
foreach(level single funneled)
  dr_mpi_test(test_mpi_api_${level} env DR_TEST_LEVEL=${level} $<TARGET_FILE:test_mpi_api>)
endforeach()

dr_mpi_group(test_mpi)
dr_mpi_group(test_mpi_faults)
if(DR_MPIRUN)
  set(run ${DR_MPIRUN} ${DR_MPIRUN_FLAGS} -n)
  foreach(ranks 2 3 5)
    dr_mpi_test(test_mpi_${ranks} ${run} ${ranks} $<TARGET_FILE:test_mpi>)
  endforeach()
  dr_mpi_test(test_mpi_faults ${run} 3 $<TARGET_FILE:test_mpi_faults>)
  # The launcher ends the job by itself, with a status that says so.
  dr_mpi_test(test_mpi_killed sh -c
    "timeout 30 \"$@\" && exit 1 || test $? -ne 124" sh
    ${run} 3 $<TARGET_FILE:test_mpi_faults> killed)
endif()
