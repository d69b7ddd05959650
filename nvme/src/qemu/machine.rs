//! The process of QEMU, and the controller on its PCI bus.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::sync::Arc;

use defuse_block::{FrameRun, MemoryRegion};
use rustix::fs::MemfdFlags;

use super::QemuOptions;
use super::protocol::QtestConnection;

/// The address of the registers.
const BAR: u64 = 0xe000_0000;

/// The class of NVMe controllers.
const CLASS: u64 = 0x01_08_02;

/// Frames of the first MiB, where a PC has other things than memory.
const LOW: u32 = 256;

pub(super) struct QemuMachine {
    child: Child,
    protocol: QtestConnection,
    slot: u32,
    is_broken: bool,
    _low: FrameRun,
}

impl QemuMachine {
    /// Starts QEMU. Also returns the size of the registers in bytes.
    pub(super) fn start(
        image: &File,
        memory: &Arc<MemoryRegion>,
        options: &QemuOptions,
    ) -> io::Result<(Self, u64)> {
        let (ours, theirs) = UnixStream::pair()?;
        let output: OwnedFd = theirs.try_clone()?.into();
        let complaints = rustix::fs::memfd_create(c"qemu", MemfdFlags::CLOEXEC)?;
        let mut complaints = File::from(complaints);
        let mut command = Command::new(&options.program);
        command.args(arguments(image, memory, options));
        command.stdin(OwnedFd::from(theirs)).stdout(output).stderr(complaints.try_clone()?);
        let child = command.spawn()?;
        // The command has the other end of the socket, which only the child may keep.
        drop(command);
        let mut machine = QemuMachine {
            child,
            protocol: QtestConnection::new(ours)?,
            slot: 0,
            is_broken: false,
            _low: low(memory).ok_or_else(|| io::Error::other("no memory below 1 MiB"))?,
        };
        let found = machine.find();
        let found = found.map_err(|error| explain(&mut complaints, &error))?;
        Ok((machine, found))
    }

    pub(super) fn read(&mut self, at: u32, bytes: u32) -> Option<u64> {
        let address = BAR + u64::from(at);
        let command = format!("{} {address:#x}", if bytes == 8 { "readq" } else { "readl" });
        self.call(&command)
    }

    pub(super) fn write(&mut self, at: u32, bytes: u32, value: u64) {
        let address = BAR + u64::from(at);
        let name = if bytes == 8 { "writeq" } else { "writel" };
        self.call(&format!("{name} {address:#x} {value:#x}"));
    }

    /// Takes the right to access memory from the controller.
    pub(super) fn cut(&mut self) {
        if self.configure(4, 2).is_err() {
            let _ = self.child.kill();
        }
    }

    fn call(&mut self, command: &str) -> Option<u64> {
        if self.is_broken {
            return None;
        }
        match self.protocol.call(command) {
            Ok(value) => Some(value),
            Err(error) => {
                log::error!("QEMU: {command}: {error}");
                self.is_broken = true;
                None
            }
        }
    }

    /// Finds the controller, and assigns an address to its registers. Returns their size in bytes.
    fn find(&mut self) -> io::Result<u64> {
        for slot in 0..32 {
            self.slot = slot;
            if self.configuration(8)? >> 8 == CLASS {
                self.configure(0x10, u64::from(u32::MAX))?;
                let size = !(self.configuration(0x10)? as u32 & !0xf);
                self.configure(0x10, BAR)?;
                self.configure(0x14, 0)?;
                // Enables the registers in memory, and access to memory.
                self.configure(4, 6)?;
                return Ok(u64::from(size) + 1);
            }
        }
        Err(io::Error::other("it has no NVMe controller"))
    }

    fn select(&mut self, register: u32) -> io::Result<()> {
        let address = 0x8000_0000 | self.slot << 11 | register;
        self.protocol.call(&format!("outl 0xcf8 {address:#x}")).map(drop)
    }

    fn configuration(&mut self, register: u32) -> io::Result<u64> {
        self.select(register)?;
        self.protocol.call("inl 0xcfc")
    }

    fn configure(&mut self, register: u32, value: u64) -> io::Result<()> {
        self.select(register)?;
        self.protocol.call(&format!("outl 0xcfc {value:#x}")).map(drop)
    }
}

impl Drop for QemuMachine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The frames of the first MiB.
fn low(memory: &Arc<MemoryRegion>) -> Option<FrameRun> {
    let mut others = Vec::new();
    while let Some(run) = memory.take(LOW) {
        if run.index() == 0 {
            return Some(run);
        }
        others.push(run);
    }
    None
}

/// The arguments of QEMU. Files are named by descriptors of this process, which QEMU opens anew: no
/// path is followed.
fn arguments(image: &File, memory: &MemoryRegion, options: &QemuOptions) -> Vec<String> {
    let path = |fd: i32| format!("/proc/{}/fd/{fd}", std::process::id());
    let (image, ram) = (path(image.as_raw_fd()), path(memory.as_fd().as_raw_fd()));
    let bytes = memory.bytes();
    let size = options.block_size;
    let mut device = format!(
        "nvme,serial=defuse,drive=disk,logical_block_size={size},physical_block_size={size}"
    );
    for property in &options.properties {
        device += &format!(",{property}");
    }
    let mut drive =
        format!("file={image},if=none,id=disk,format=raw,cache=writeback,discard=unmap");
    for property in &options.drive {
        drive += &format!(",{property}");
    }
    let object =
        format!("memory-backend-file,id=ram,size={bytes},mem-path={ram},share=on,prealloc=off");
    // The processor is stopped (-S), so there is no need of a system in the machine.
    let text = [
        "-S -display none -nodefaults -no-user-config -machine q35,accel=tcg,memory-backend=ram",
        "-qtest stdio -qtest-log /dev/null",
    ];
    let mut arguments: Vec<String> =
        text.iter().flat_map(|part| part.split(' ')).map(str::to_owned).collect();
    arguments.extend(["-m", &format!("{bytes}B"), "-object", &object].map(str::to_owned));
    arguments.extend(["-drive", &drive, "-device", &device].map(str::to_owned));
    arguments
}

/// The error, with the output of QEMU.
fn explain(complaints: &mut File, error: &io::Error) -> io::Error {
    let mut text = String::new();
    let read = complaints.seek(SeekFrom::Start(0)).and_then(|_| {
        let mut start = (&*complaints).take(1000);
        start.read_to_string(&mut text)
    });
    match read {
        Ok(1..) => io::Error::other(format!("QEMU: {}", text.trim())),
        _ => io::Error::other(format!("QEMU: {error}")),
    }
}
