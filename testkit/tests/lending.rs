//! Buffers that lend their memory, through every frontend.

mod ways;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use defuse_direct::{
    ClientMountArgs, ClientTask, DirectClient, OpenHow, TaskCredentials, WalkStart, WorkDir,
};
use defuse_fs::{
    Caps, Context, Errno, File, FileSystem, Io, IoOp, ReadArgs, ReadBuf, Result, SliceSink,
    SliceSource, WriteArgs, WriteBuf, delegate,
};
use defuse_memory::{MemoryFileSystem, MemoryOptions};

/// A file system that reads and writes only in memory that it was lent, as a device would.
struct LendingDevice {
    inner: MemoryFileSystem,
    submits: bool,
    /// Addresses of the memory that the last read and the last write were lent.
    read_at: AtomicUsize,
    written_from: AtomicUsize,
}

impl LendingDevice {
    fn new(submits: bool) -> Arc<Self> {
        let inner = MemoryFileSystem::new(MemoryOptions::default());
        let (read_at, written_from) = Default::default();
        Arc::new(LendingDevice { inner, submits, read_at, written_from })
    }
}

impl FileSystem for LendingDevice {
    delegate!(to inner, except caps, read, write, submit);

    fn caps(&self) -> Caps {
        Caps { submits: self.submits, ..self.inner.caps() }
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let mut done = 0;
        while let Some(room) = out.lend() {
            self.read_at.store(room.as_ptr() as usize, Ordering::SeqCst);
            let len = room.len();
            let mut sink = SliceSink::new(room);
            let mut part = ReadBuf::new(&mut sink, len);
            let args = ReadArgs { offset: args.offset + done, ..args };
            FileSystem::read(&self.inner, cx, file, args, &mut part)?;
            let count = part.filled_len();
            out.advance(count)?;
            done += count as u64;
            if count < len {
                return Ok(());
            }
        }
        if out.remaining() > 0 { Err(Errno::EOPNOTSUPP) } else { Ok(()) }
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let mut done = 0;
        while let Some(bytes) = data.borrow() {
            self.written_from.store(bytes.as_ptr() as usize, Ordering::SeqCst);
            let mut source = SliceSource::new(bytes);
            let args = WriteArgs { offset: args.offset + done as u64, ..args };
            let mut part = WriteBuf::new(&mut source);
            let count = FileSystem::write(&self.inner, cx, file, args, &mut part)?;
            data.skip(count)?;
            done += count;
        }
        if data.remaining() > 0 { Err(Errno::EOPNOTSUPP) } else { Ok(done) }
    }
}

#[test]
fn every_frontend_lends_its_private_memory() {
    for submits in [false, true] {
        ways::run_on_each(
            || LendingDevice::new(submits),
            |way, fs, open| {
                let file = open();
                // More than a page, and less than what the kernel mount splices.
                let bytes: Vec<u8> = (0..20_000).map(|at| (at % 251) as u8).collect();
                assert_eq!(file.pwrite(&bytes, 3), bytes.len(), "{way} {submits}");
                let mut read = vec![0; bytes.len() + 9];
                assert_eq!(file.pread(&mut read, 3), bytes.len(), "{way} {submits}");
                assert_eq!(read[..bytes.len()], bytes, "{way} {submits}");
                // In the same process, it is the memory of the caller itself.
                let lent = fs.read_at.load(Ordering::SeqCst) == read.as_ptr() as usize
                    && fs.written_from.load(Ordering::SeqCst) == bytes.as_ptr() as usize;
                assert_eq!(lent, way == "direct", "{way} {submits}");
            },
        );
    }
}

/// A file system whose device reads and writes on another thread, in memory that it was given.
struct OwnedMemoryDevice {
    inner: Arc<MemoryFileSystem>,
    given: Arc<AtomicUsize>,
}

impl OwnedMemoryDevice {
    fn new() -> Arc<Self> {
        Arc::new(OwnedMemoryDevice {
            inner: Arc::new(MemoryFileSystem::new(MemoryOptions::default())),
            given: Arc::default(),
        })
    }
}

impl FileSystem for OwnedMemoryDevice {
    delegate!(to inner, except caps, read, write, submit);

    fn caps(&self) -> Caps {
        Caps { submits: true, ..self.inner.caps() }
    }

    fn submit(&self, mut io: Io) {
        let (inner, given) = (Arc::clone(&self.inner), Arc::clone(&self.given));
        let cx = Context::new(io.caller());
        match io.op() {
            IoOp::Read { file, args, len } => {
                let Some(mut room) = io.take_room() else { return inner.submit(io) };
                assert!(io.take_room().is_none_or(|other| other.as_ptr() != room.as_ptr()));
                given.store(room.as_ptr() as usize, Ordering::SeqCst);
                std::thread::spawn(move || {
                    let mut sink = SliceSink::new(&mut room[..len]);
                    let mut out = ReadBuf::new(&mut sink, len);
                    let read = FileSystem::read(&*inner, &cx, file, args, &mut out);
                    let filled = out.filled_len();
                    io.finish_room(room, read.map(|()| filled));
                });
            }
            IoOp::Write { file, args, .. } => {
                let Some(bytes) = io.take_data() else { return inner.submit(io) };
                given.store(bytes.as_ptr() as usize, Ordering::SeqCst);
                std::thread::spawn(move || {
                    let mut source = SliceSource::new(&bytes);
                    let mut data = WriteBuf::new(&mut source);
                    io.finish(FileSystem::write(&*inner, &cx, file, args, &mut data));
                });
            }
            _ => inner.submit(io),
        }
    }
}

#[test]
fn memory_is_given_to_a_device_only_in_the_process_of_its_owner() {
    ways::run_on_each(OwnedMemoryDevice::new, |way, fs, open| {
        let file = open();
        let bytes: Vec<u8> = (0..20_000).map(|at| (at % 251) as u8).collect();
        assert_eq!(file.pwrite(&bytes, 3), bytes.len(), "{way}");
        let mut read = vec![0; bytes.len() + 9];
        assert_eq!(file.pread(&mut read, 3), bytes.len(), "{way}");
        assert_eq!(read[..bytes.len()], bytes, "{way}");
        assert_eq!(fs.given.load(Ordering::SeqCst) != 0, way == "direct", "{way}");
    });
}

#[test]
fn an_asynchronous_transfer_uses_the_memory_of_the_caller() {
    let fs = OwnedMemoryDevice::new();
    let client = DirectClient::new(defuse_direct::ClientOptions::default());
    client.mount(b"a:", fs.clone(), &ClientMountArgs::default()).unwrap();
    let task = ClientTask::new(TaskCredentials::user(0, 0, &[]), WorkDir::Outside(b"/".to_vec()));
    let how = OpenHow { flags: 0o102, mode: 0o600, ..OpenHow::default() };
    let file = client.open(&task, WalkStart::Cwd, b"a:/file", how).unwrap();
    let given = || fs.given.load(Ordering::SeqCst);
    let bytes = b"some text".to_vec();
    let address = bytes.as_ptr() as usize;
    let (written, _) = client.start_write(&task, &file, bytes, 0).unwrap().wait();
    assert_eq!((written, given()), (Ok(9), address));
    let room = vec![b'-'; 20];
    let address = room.as_ptr() as usize;
    let reading = client.start_read_into(&task, &file, (room, 5), None).unwrap();
    let (read, room) = reading.wait();
    assert_eq!((read, &room[..]), (Ok(4), &b"text"[..]));
    assert_eq!((given(), room.as_ptr() as usize), (address, address));
    // The other buffers fill the same memory.
    let memory = MemoryFileSystem::new(MemoryOptions::default());
    client.mount(b"m:", Arc::new(memory), &ClientMountArgs::default()).unwrap();
    let file = client.open(&task, WalkStart::Cwd, b"m:/file", how).unwrap();
    client.pwrite(&task, &file, b"some text", 4000).unwrap();
    let room = vec![b'-'; 5000];
    let address = room.as_ptr() as usize;
    let (read, room) = client.start_read_into(&task, &file, (room, 3990), None).unwrap().wait();
    assert_eq!((read, &room[..]), (Ok(19), &b"\0\0\0\0\0\0\0\0\0\0some text"[..]));
    assert_eq!(room.as_ptr() as usize, address);
}
