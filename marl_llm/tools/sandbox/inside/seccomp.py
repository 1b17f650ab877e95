"""The system-call filter of a candidate program, as a classic BPF program for seccomp(2), for x86_64 and aarch64.

A deny list by class, and everything newer than the list answers ENOSYS: an unknown call is one that nobody has judged. Calls that programs
probe for (clone3, memfd_create, io_uring) answer ENOSYS, so that libraries take their old path; the others answer EPERM.
"""

import ctypes
import errno
import platform
import struct

from . import linux

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NEWEST = 462  # mseal, Linux 6.10: the last call that this list has judged

ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LD, JEQ, JGE, JSET, RET = 0x20, 0x15, 0x35, 0x45, 0x06
NR, ARCH, ARG0 = 0, 4, 16

# name: (x86_64, aarch64); None where the architecture has no such call.
NAMESPACES_AND_MOUNTS = dict(
    unshare=(272, 97), setns=(308, 268), mount=(165, 40), umount2=(166, 39), pivot_root=(155, 41), chroot=(161, 51), move_mount=(429, 429),
    open_tree=(428, 428), fsopen=(430, 430), fsconfig=(431, 431), fsmount=(432, 432), fspick=(433, 433), mount_setattr=(442, 442),
    statmount=(457, 457), listmount=(458, 458), name_to_handle_at=(303, 264), open_by_handle_at=(304, 265), quotactl=(179, 60),
    quotactl_fd=(443, 443), swapon=(167, 224), swapoff=(168, 225), mknod=(133, None), fanotify_init=(300, 262), fanotify_mark=(301, 263),
)  # fmt: skip
OTHER_PROCESSES = dict(
    ptrace=(101, 117), process_vm_readv=(310, 270), process_vm_writev=(311, 271), pidfd_getfd=(438, 438), kcmp=(312, 272),
    process_madvise=(440, 440), process_mrelease=(448, 448), move_pages=(279, 239), migrate_pages=(256, 238), perf_event_open=(298, 241),
    sched_setscheduler=(144, 119), sched_setparam=(142, 118), sched_setattr=(314, 274), ioprio_set=(251, 30),
)  # fmt: skip
KERNEL = dict(
    bpf=(321, 280), kexec_load=(246, 104), kexec_file_load=(320, 294), init_module=(175, 105), finit_module=(313, 273),
    delete_module=(176, 106), reboot=(169, 142), syslog=(103, 116), acct=(163, 89), settimeofday=(164, 170), clock_settime=(227, 112),
    clock_adjtime=(305, 266), adjtimex=(159, 171), sethostname=(170, 161), setdomainname=(171, 162), personality=(135, 92),
    userfaultfd=(323, 282), iopl=(172, None), ioperm=(173, None), modify_ldt=(154, None), uselib=(134, None), vhangup=(153, 58),
    lookup_dcookie=(212, 18), nfsservctl=(180, 42), add_key=(248, 217), request_key=(249, 218), keyctl=(250, 219), vmsplice=(278, 75),
    mbind=(237, 235), set_mempolicy=(238, 237), sync=(162, 81), lsm_set_self_attr=(460, 460),
)  # fmt: skip
MEMORY_THAT_OUTLIVES = dict(
    shmget=(29, 194), shmat=(30, 196), shmctl=(31, 195), shmdt=(67, 197), semget=(64, 190), semop=(65, 193), semctl=(66, 191),
    semtimedop=(220, 192), msgget=(68, 186), msgsnd=(69, 189), msgrcv=(70, 188), msgctl=(71, 187), mq_open=(240, 180), mq_unlink=(241, 181),
    mq_timedsend=(242, 182), mq_timedreceive=(243, 183), mq_notify=(244, 184), mq_getsetattr=(245, 185),
)  # fmt: skip
# What happens to the host's files and to what other slots do with them: read-only mounts share their inodes with the host.
WATCHES_AND_LOCKS = dict(
    inotify_init=(253, None), inotify_init1=(294, 26), inotify_add_watch=(254, 27), flock=(73, 32),
)  # fmt: skip
ABSENT = dict(
    clone3=(435, 435), memfd_create=(319, 279), memfd_secret=(447, 447), io_uring_setup=(425, 425), io_uring_enter=(426, 426),
    io_uring_register=(427, 427), getrandom=(318, 278),
)  # fmt: skip
# fcntl(2): open-file-description locks, leases, directory notification, sizes of pipes. POSIX record locks stay: sqlite needs them.
FCNTL, FCNTL_REFUSED = (72, 25), (36, 37, 38, 1024, 1026, 1031)
# Kernel memory that no limit counts. setsockopt(2): SO_SNDBUF, SO_RCVBUF and their FORCE. mmap(2): what is both shared and anonymous stays
# as long as one page of it is mapped, and counts where it was touched only; files of the box's tmpfs can be shared.
SETSOCKOPT, BUFFER_SIZES = (54, 208), (7, 8, 32, 33)
MMAP, MAP_SHARED, MAP_ANONYMOUS = (9, 222), 0x01, 0x20
CLONE, SOCKET, SOCKETPAIR, SETPRIORITY, SETAFFINITY = (56, 220), (41, 198), (53, 199), (141, 140), (203, 122)
PRLIMIT, IOCTL, MKNODAT = (302, 261), (16, 29), (259, 33)
CLONE_NEW = 0x7E020000 | 0x80  # every CLONE_NEW* flag
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
AF_UNIX = 1


def _ins(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jt, jf, k)


def program(machine: str | None = None, unix_sockets: bool = True, seeded_entropy: bool = True) -> bytes:
    """The filter as an array of `struct sock_filter`.

    Args:
      machine: as `platform.machine()` names it; None for this one.
      unix_sockets: whether AF_UNIX sockets may be made. Pairs always may (asyncio needs them). Off where no namespace keeps a program
        from the sockets of others.
      seeded_entropy: whether getrandom(2) answers ENOSYS, so that C code falls back to /dev/urandom, which a box can seed.

    Raises:
      OSError: the architecture has no table here.
    """
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no seccomp table for {machine}; there are {', '.join(AUDIT_ARCH)}")
    column = list(AUDIT_ARCH).index(machine)
    refuse, absent = _ins(RET, ERRNO | errno.EPERM), _ins(RET, ERRNO | errno.ENOSYS)
    code = [_ins(LD, ARCH), _ins(JEQ, AUDIT_ARCH[machine], 1, 0), _ins(RET, KILL_PROCESS), _ins(LD, NR)]
    code += [_ins(JGE, NEWEST + 1, 0, 1), absent]
    for table, answer in (
        (NAMESPACES_AND_MOUNTS, refuse),
        (OTHER_PROCESSES, refuse),
        (KERNEL, refuse),
        (MEMORY_THAT_OUTLIVES, refuse),
        (WATCHES_AND_LOCKS, absent),
        (ABSENT, absent),
    ):
        for name, numbers in table.items():
            if numbers[column] is not None and (name != "getrandom" or seeded_entropy):
                code += [_ins(JEQ, numbers[column], 0, 1), answer]

    def on_argument(numbers, offset, tests):
        """`tests` see the low half of one argument and fall through to ALLOW."""
        body = [_ins(LD, offset), *tests, _ins(RET, ALLOW)]
        return [_ins(JEQ, numbers[column], 0, len(body)), *body]

    no_family = _ins(RET, ERRNO | errno.EAFNOSUPPORT)
    code += on_argument(CLONE, ARG0, [_ins(JSET, CLONE_NEW, 0, 1), refuse])
    code += on_argument(SOCKET, ARG0, [_ins(JEQ, AF_UNIX, 1, 0), no_family] if unix_sockets else [no_family])
    code += on_argument(SOCKETPAIR, ARG0, [_ins(JEQ, AF_UNIX, 1, 0), no_family])
    code += on_argument(FCNTL, ARG0 + 8, [ins for command in FCNTL_REFUSED for ins in (_ins(JEQ, command, 0, 1), refuse)])
    code += on_argument(SETSOCKOPT, ARG0 + 16, [ins for option in BUFFER_SIZES for ins in (_ins(JEQ, option, 0, 1), refuse)])
    code += on_argument(MMAP, ARG0 + 24, [_ins(JSET, MAP_ANONYMOUS, 0, 2), _ins(JSET, MAP_SHARED, 0, 1), refuse])
    code += on_argument(SETPRIORITY, ARG0 + 8, [_ins(JEQ, 0, 1, 0), refuse])
    code += on_argument(SETAFFINITY, ARG0, [_ins(JEQ, 0, 1, 0), refuse])
    code += on_argument(PRLIMIT, ARG0, [_ins(JEQ, 0, 1, 0), refuse])
    code += on_argument(IOCTL, ARG0 + 8, [_ins(JEQ, TIOCSTI, 1, 0), _ins(JEQ, TIOCLINUX, 0, 1), refuse])
    # mknodat makes FIFOs (mode 0010000) and plain files, not devices
    code += on_argument(MKNODAT, ARG0 + 16, [_ins(JSET, 0x2000, 0, 1), refuse])
    code += [_ins(RET, ALLOW)]
    return b"".join(code)


def prepared(code: bytes) -> tuple[linux.SockFprog, object]:
    """The structure that `linux.install_filter` takes, and the memory that must outlive it."""
    memory = ctypes.create_string_buffer(code, len(code))
    return linux.SockFprog(len(code) // 8, ctypes.addressof(memory)), memory
