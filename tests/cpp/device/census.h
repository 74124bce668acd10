// Which kernels a test has launched; census.py compares the tests with the library's kernels.
#pragma once

namespace device {

// Writes the kernel to the file PYCOMM_CENSUS, if that is set, as its offset in the executable.
void count_launch(const void* kernel);

}  // namespace device
