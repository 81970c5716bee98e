// A CUDA device that does nothing: enough for torch to trace and compile for one. Every event is over at once.
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;
using namespace c10::impl;

namespace {
const Device only(DeviceType::CUDA, 0);

struct Nothing : public DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return only; }
  Device getDevice() const override { return only; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, only); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, only); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return Stream(Stream::DEFAULT, only); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, only); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, only); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = (void*)1; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};

DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Nothing());
}  // namespace
