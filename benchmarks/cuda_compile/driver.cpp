// Loaded before torch: stands for libcuda.so.1, in which every call fails, and says that there is one device.
#include <cstdint>

namespace c10::cuda {
int8_t device_count_ensure_non_zero() { return 1; }
int8_t device_count() noexcept { return 1; }
}  // namespace c10::cuda

#define REFUSE(name) \
  int name(...) { return 100; }  // CUDA_ERROR_NO_DEVICE

extern "C" {
REFUSE(cuCtxGetCurrent)
REFUSE(cuCtxSetCurrent)
REFUSE(cuCtxSetLimit)
REFUSE(cuDeviceGet)
REFUSE(cuDeviceGetAttribute)
REFUSE(cuDevicePrimaryCtxRetain)
REFUSE(cuDriverGetVersion)
REFUSE(cuFuncGetAttribute)
REFUSE(cuFuncSetAttribute)
REFUSE(cuFuncSetCacheConfig)
REFUSE(cuInit)
REFUSE(cuLaunchCooperativeKernel)
REFUSE(cuLaunchKernel)
REFUSE(cuLinkAddData_v2)
REFUSE(cuLinkComplete)
REFUSE(cuLinkCreate_v2)
REFUSE(cuModuleGetFunction)
REFUSE(cuModuleLoad)
REFUSE(cuModuleLoadData)
REFUSE(cuModuleLoadDataEx)
REFUSE(cuModuleUnload)
REFUSE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSE(cuPointerGetAttribute)
REFUSE(cuTensorMapEncodeTiled)
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 0;
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "there is no device";
  return 0;
}
}
