from torch.distributed import ProcessGroup

class GroupCoordinator:
    cpu_group: ProcessGroup
    device_group: ProcessGroup
