from sglang_releases import SINCE_0_5_23

if SINCE_0_5_23:
    class DevicePoolInfo:
        buffer_info: object
