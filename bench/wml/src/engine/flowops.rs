//! The flowops of the language.

use std::io;
use std::path::Path;

use rand::Rng;

use super::failure::RunFailure;
use super::worker::{FlowopOutcome, WorkloadThread};
use crate::driver::{OpenAccess, WorkloadDriver};
use crate::files::{EntryChoice, EntryState, make_path};
use crate::plan::{FlowopKind, FlowopPlan, MAX_FD};

/// The unit in which a limit counts.
#[derive(Clone, Copy)]
enum LimitUnit {
    Operations,
    DataOperations,
    Bytes,
}

/// Bytes per event for `bwlimit`.
const EVENT_BYTES: u64 = 1 << 20;

type FlowopResult<T> = Result<T, FlowopOutcome>;

impl<D: WorkloadDriver> WorkloadThread<'_, D> {
    /// Performs a flowop once.
    pub fn perform(&mut self, step: &FlowopPlan) -> FlowopOutcome {
        let result = match step.kind {
            FlowopKind::Read => self.read(step),
            FlowopKind::Write => self.write(step),
            FlowopKind::CreateFile => self.create(step),
            FlowopKind::OpenFile => self.open_file(step),
            FlowopKind::CloseFile => self.close(step),
            FlowopKind::ReadWholeFile => self.read_whole(step),
            FlowopKind::WriteWholeFile => self.write_whole(step),
            FlowopKind::AppendFile => self.append(step, false),
            FlowopKind::AppendFileRand => self.append(step, true),
            FlowopKind::DeleteFile => self.delete(step),
            FlowopKind::StatFile => self.stat(step),
            FlowopKind::Fsync => self.fsync(step),
            FlowopKind::FsyncSet => self.fsync_set(step),
            FlowopKind::MakeDir => self.make_directory(step),
            FlowopKind::RemoveDir => self.remove_directory(step),
            FlowopKind::ListDir => self.list_directory(step),
            FlowopKind::EventLimit => self.event_limit(step),
            FlowopKind::OpsLimit => self.limit(step, LimitUnit::Operations),
            FlowopKind::IoOpsLimit => self.limit(step, LimitUnit::DataOperations),
            FlowopKind::BandwidthLimit => self.limit(step, LimitUnit::Bytes),
            FlowopKind::Hog => self.burn_cpu(step),
            FlowopKind::Delay => self.delay(step),
            FlowopKind::Block | FlowopKind::Wakeup | FlowopKind::SemBlock | FlowopKind::SemPost => {
                self.meet(step)
            }
            FlowopKind::FinishOnCount => self.finish_on_count(step),
            FlowopKind::FinishOnBytes => self.finish_on_bytes(step),
            // The caller handles these.
            FlowopKind::Composite(_) => Ok(()),
        };
        match result {
            Ok(()) => FlowopOutcome::Done,
            Err(outcome) => outcome,
        }
    }

    fn fail<T>(
        &self,
        step: &FlowopPlan,
        path: Option<&Path>,
        error: &io::Error,
    ) -> FlowopResult<T> {
        Err(FlowopOutcome::Failed(RunFailure::flowop(step, path, error)))
    }

    fn fail_on_descriptor<T>(
        &self,
        step: &FlowopPlan,
        fd: usize,
        error: &io::Error,
    ) -> FlowopResult<T> {
        self.fail(step, self.path_of(fd).as_deref(), error)
    }

    fn fail_on_misuse<T>(&self, step: &FlowopPlan, what: &str) -> FlowopResult<T> {
        Err(FlowopOutcome::Failed(RunFailure::wrong_use(step, what)))
    }

    /// The file set of a flowop. Its presence was checked before the run.
    fn set_of(&self, step: &FlowopPlan) -> FlowopResult<usize> {
        step.fileset.map_or_else(|| self.fail_on_misuse(step, "has no file set for"), Ok)
    }

    fn choose_entry(&mut self, step: &FlowopPlan, entries: u32, own_rotation: bool) -> EntryChoice {
        match step.indexed {
            Some(number) if entries > 0 => {
                EntryChoice::At((self.number(number) % u64::from(entries)) as u32)
            }
            _ => EntryChoice::Next(own_rotation.then_some(self.number)),
        }
    }

    fn pick(&mut self, step: &FlowopPlan, state: EntryState) -> FlowopResult<(usize, u32)> {
        let set = self.set_of(step)?;
        let how = self.choose_entry(step, self.sets[set].files(), step.opennext);
        let found = self.sets[set].pool.pick(state, how, &self.stop_condition());
        found.map(|file| (set, file)).ok_or(FlowopOutcome::NoFile)
    }

    /// The number of the descriptor that a flowop uses now.
    fn descriptor(&mut self, step: &FlowopPlan) -> FlowopResult<usize> {
        if step.fd > 0 || !step.opennext {
            return Ok(step.fd);
        }
        let entries = self.sets[self.set_of(step)?].files() as usize;
        if entries > MAX_FD / 2 {
            let what = format!("rotates through {entries} files, but has {} for", MAX_FD / 2);
            return self.fail_on_misuse(step, &what);
        }
        if self.rotor == 0 || entries == MAX_FD - self.rotor {
            self.rotor = MAX_FD;
        }
        self.rotor -= 1;
        Ok(self.rotor)
    }

    fn access(&self, set: usize, create: bool) -> OpenAccess {
        let plan = &self.sets[set].plan;
        OpenAccess { read: plan.readonly || !plan.writeonly, write: !plan.readonly, create }
    }

    fn open(&mut self, step: &FlowopPlan, fd: usize) -> FlowopResult<()> {
        if self.descriptors[fd].file.is_some() {
            return self.fail_on_misuse(step, "opens once more without closing");
        }
        let (set, file) = self.pick(step, EntryState::Exists)?;
        let path = self.sets[set].file_path(file);
        let access = self.access(set, false);
        let began = self.begin();
        let opened = self.driver.open(&path, access, step.open);
        self.end(step, began, 0);
        self.record_open(step, fd, (set, file), opened, &path)
    }

    fn record_open(
        &mut self,
        step: &FlowopPlan,
        fd: usize,
        (set, file): (usize, u32),
        opened: io::Result<D::File>,
        path: &Path,
    ) -> FlowopResult<()> {
        let pool = &self.sets[set].pool;
        match opened {
            Ok(open) => {
                let created = step.kind == FlowopKind::CreateFile;
                pool.release(file, created.then_some(EntryState::Exists), 1);
                self.descriptors[fd].file = Some(open);
                self.descriptors[fd].entry = Some((set, file));
                Ok(())
            }
            Err(error) => {
                pool.release(file, None, 0);
                self.fail(step, Some(path), &error)
            }
        }
    }

    fn open_file(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let fd = self.descriptor(step)?;
        self.open(step, fd)
    }

    /// Creates missing parent directories, as Filebench does, which requires a stat first.
    fn create(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let fd = step.fd;
        if self.descriptors[fd].file.is_some() {
            return self.fail_on_misuse(step, "creates without closing");
        }
        let (set, file) = self.pick(step, EntryState::Absent)?;
        let path = self.sets[set].file_path(file);
        let parent = path.parent().unwrap_or(Path::new("/"));
        let access = self.access(set, true);
        let began = self.begin();
        let ready = match self.driver.stat(parent) {
            Ok(_) => Ok(()),
            Err(_) => make_path(self.driver, parent),
        };
        let opened = ready.and_then(|()| self.driver.open(&path, access, step.open));
        self.end(step, began, 0);
        self.record_open(step, fd, (set, file), opened, &path)
    }

    fn close(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let descriptor = &mut self.descriptors[step.fd];
        let (Some(file), Some((set, entry))) = (descriptor.file.take(), descriptor.entry) else {
            return self.fail_on_misuse(step, "closes the closed");
        };
        // Marked busy, so that no other thread picks it during the close.
        let pool = &self.sets[set].pool;
        let taken = pool.take(entry, &self.stop_condition());
        let began = self.begin();
        drop(file);
        self.end(step, began, 0);
        if taken {
            pool.release(entry, None, -1);
        }
        Ok(())
    }

    /// An open descriptor. If it is closed, this opens a file for it.
    #[inline]
    fn prepare_descriptor(&mut self, step: &FlowopPlan) -> FlowopResult<usize> {
        let fd = self.descriptor(step)?;
        if self.descriptors[fd].file.is_none() {
            if step.fileset.is_none() {
                return self.fail_on_misuse(step, "has no file set for the closed");
            }
            self.open(step, fd)?;
        }
        Ok(fd)
    }

    /// The working set of the file of a descriptor, in bytes.
    fn working_set(&self, step: &FlowopPlan, fd: usize) -> u64 {
        match (step.workingset, self.descriptors[fd].entry) {
            (0, Some((set, file))) => self.sets[set].size(file),
            (bytes, _) => bytes,
        }
    }

    /// A random offset for `iosize` bytes: a multiple of `iosize`, so that they end within the
    /// file.
    fn offset(&mut self, step: &FlowopPlan, fd: usize, iosize: u64) -> FlowopResult<u64> {
        let size = self.working_set(step, fd);
        if iosize > size || iosize == 0 {
            let what = format!("does {iosize} bytes in a file of {size} bytes on");
            return self.fail_on_misuse(step, &what);
        }
        let offset = self.random.random_range(0..=size - iosize);
        Ok(offset / iosize * iosize)
    }

    fn read(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let iosize = self.number(step.iosize);
        let fd = self.prepare_descriptor(step)?;
        let offset = if step.random { Some(self.offset(step, fd, iosize)?) } else { None };
        let began = self.begin();
        let data = self.memory.piece(iosize as usize, &mut self.random);
        let Some(file) = &mut self.descriptors[fd].file else { return Ok(()) };
        let read = match offset {
            Some(offset) => self.driver.read_at(file, data, offset),
            None => self.driver.read(file, data),
        };
        // The read after the end of the file starts at its beginning again.
        let rewound = match &read {
            Ok(0) => self.driver.rewind(file),
            _ => Ok(()),
        };
        self.end(step, began, *read.as_ref().unwrap_or(&0) as u64);
        match read.and(rewound) {
            Ok(()) => Ok(()),
            Err(error) => self.fail_on_descriptor(step, fd, &error),
        }
    }

    fn write(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let iosize = self.number(step.iosize);
        let fd = self.prepare_descriptor(step)?;
        let offset = if step.random { Some(self.offset(step, fd, iosize)?) } else { None };
        let began = self.begin();
        let written = self.write_piece(fd, iosize as usize, offset);
        self.end(step, began, if written.is_ok() { iosize } else { 0 });
        written.or_else(|error| self.fail_on_descriptor(step, fd, &error))
    }

    /// Writes a whole buffer. After a short write, it writes the rest.
    fn write_piece(&mut self, fd: usize, length: usize, offset: Option<u64>) -> io::Result<()> {
        let data = self.memory.piece(length, &mut self.random);
        let Some(file) = &mut self.descriptors[fd].file else { return Ok(()) };
        let mut done = 0;
        while done < length {
            let more = match offset {
                Some(offset) => self.driver.write_at(file, &data[done..], offset + done as u64)?,
                None => self.driver.write(file, &data[done..])?,
            };
            if more == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            done += more;
        }
        Ok(())
    }

    fn read_whole(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let fd = self.prepare_descriptor(step)?;
        let iosize = match self.number(step.iosize) {
            0 => self.working_set(step, fd).max(1),
            size => size,
        };
        let began = self.begin();
        let data = self.memory.piece(iosize as usize, &mut self.random);
        let Some(file) = &mut self.descriptors[fd].file else { return Ok(()) };
        let mut bytes = 0;
        let mut result = self.driver.rewind(file);
        while result.is_ok() {
            match self.driver.read(file, data) {
                Ok(0) => break,
                Ok(more) => bytes += more as u64,
                Err(error) => result = Err(error),
            }
        }
        self.end(step, began, bytes);
        result.or_else(|error| self.fail_on_descriptor(step, fd, &error))
    }

    /// Writes the size of the file of `srcfd`, or its planned size, at the position of the
    /// descriptor.
    fn write_whole(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let fd = self.prepare_descriptor(step)?;
        let total = match self.descriptors[step.srcfd].entry {
            Some((set, file)) => self.sets[set].size(file),
            None if step.srcfd > 0 => return self.fail_on_misuse(step, "has no source file for"),
            None => self.working_set(step, fd),
        };
        let iosize = match self.number(step.iosize) {
            0 => self.working_set(step, fd),
            size => size,
        };
        let began = self.begin();
        let (mut bytes, mut result) = (0, Ok(()));
        while bytes < total && result.is_ok() {
            let length = (total - bytes).min(iosize.max(1));
            result = self.write_piece(fd, length as usize, None);
            bytes += length;
        }
        self.end(step, began, if result.is_ok() { bytes } else { 0 });
        result.or_else(|error| self.fail_on_descriptor(step, fd, &error))
    }

    fn append(&mut self, step: &FlowopPlan, random_size: bool) -> FlowopResult<()> {
        let mut size = self.number(step.iosize);
        if random_size {
            size = if size > 0 { self.random.random_range(0..size) } else { 0 };
            if size == 0 {
                // Writing nothing is an operation, too, as in Filebench.
                let began = self.begin();
                self.end(step, began, 0);
                return Ok(());
            }
        }
        let fd = self.prepare_descriptor(step)?;
        let began = self.begin();
        let at_end = match &mut self.descriptors[fd].file {
            Some(file) => self.driver.seek_end(file),
            None => Ok(()),
        };
        let result = at_end.and_then(|()| self.write_piece(fd, size as usize, None));
        self.end(step, began, if result.is_ok() { size } else { 0 });
        result.or_else(|error| self.fail_on_descriptor(step, fd, &error))
    }

    /// Does not delete a file that other threads have open, and then counts nothing.
    fn delete(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let known = if step.fd > 0 { self.descriptors[step.fd].entry.take() } else { None };
        let (set, file) = match known {
            Some((set, file)) if self.sets[set].pool.take(file, &self.stop_condition()) => {
                (set, file)
            }
            Some(_) => return Err(FlowopOutcome::Over),
            None => self.pick(step, EntryState::Exists)?,
        };
        let pool = &self.sets[set].pool;
        let open = pool.open_count(file);
        let mine = u32::from(step.fd > 0 && self.descriptors[step.fd].file.is_some());
        if open > mine {
            pool.release(file, None, 0);
            return Ok(());
        }
        let path = self.sets[set].file_path(file);
        let began = self.begin();
        let result = self.driver.unlink(&path);
        self.end(step, began, 0);
        pool.release(file, Some(EntryState::Absent), -(open as i32));
        result.or_else(|error| self.fail(step, Some(&path), &error))
    }

    fn stat(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        if step.fd > 0 && self.descriptors[step.fd].file.is_some() {
            let began = self.begin();
            let result = match &mut self.descriptors[step.fd].file {
                Some(file) => self.driver.size_of(file).map(|_| ()),
                None => Ok(()),
            };
            self.end(step, began, 0);
            return result.or_else(|error| self.fail_on_descriptor(step, step.fd, &error));
        }
        let (set, file) = self.pick(step, EntryState::Exists)?;
        let path = self.sets[set].file_path(file);
        let began = self.begin();
        let result = self.driver.stat(&path);
        self.end(step, began, 0);
        self.sets[set].pool.release(file, None, 0);
        result.map(|_| ()).or_else(|error| self.fail(step, Some(&path), &error))
    }

    fn fsync_one(&mut self, step: &FlowopPlan, fd: usize) -> FlowopResult<()> {
        let began = self.begin();
        let Some(file) = &mut self.descriptors[fd].file else {
            return self.fail_on_misuse(step, "syncs the closed");
        };
        let result = self.driver.fsync(file);
        self.end(step, began, 0);
        result.or_else(|error| self.fail_on_descriptor(step, fd, &error))
    }

    fn fsync(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        self.fsync_one(step, step.fd)
    }

    fn fsync_set(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let set = self.set_of(step)?;
        for fd in 0..MAX_FD {
            let descriptor = &self.descriptors[fd];
            let fits = descriptor.entry.is_some_and(|(other, _)| other == set);
            if fits && descriptor.file.is_some() {
                self.fsync_one(step, fd)?;
            }
        }
        Ok(())
    }

    fn pick_leafdir(&mut self, step: &FlowopPlan, state: EntryState) -> FlowopResult<(usize, u32)> {
        let set = self.set_of(step)?;
        let how = self.choose_entry(step, self.sets[set].leafdirs(), false);
        let found = self.sets[set].leaf_pool.pick(state, how, &self.stop_condition());
        found.map(|leafdir| (set, leafdir)).ok_or(FlowopOutcome::NoFile)
    }

    fn make_directory(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let (set, leafdir) = self.pick_leafdir(step, EntryState::Absent)?;
        let path = self.sets[set].leafdir_path(leafdir);
        let began = self.begin();
        let result = match self.driver.mkdir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => make_path(self.driver, &path),
            other => other,
        };
        self.end(step, began, 0);
        let now = if result.is_ok() { EntryState::Exists } else { EntryState::Absent };
        self.sets[set].leaf_pool.release(leafdir, Some(now), 0);
        result.or_else(|error| self.fail(step, Some(&path), &error))
    }

    fn remove_directory(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let (set, leafdir) = self.pick_leafdir(step, EntryState::Exists)?;
        let path = self.sets[set].leafdir_path(leafdir);
        let began = self.begin();
        let result = self.driver.rmdir(&path);
        self.end(step, began, 0);
        let now = if result.is_ok() { EntryState::Absent } else { EntryState::Exists };
        self.sets[set].leaf_pool.release(leafdir, Some(now), 0);
        result.or_else(|error| self.fail(step, Some(&path), &error))
    }

    /// Counts the bytes of the names as the size of a listing.
    fn list_directory(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let set = self.set_of(step)?;
        let path = self.sets[set].directory_path(self.sets[set].next_directory());
        let mut bytes = 0;
        let began = self.begin();
        let result = self.driver.list(&path, &mut |name, _| bytes += name.len() as u64);
        self.end(step, began, bytes);
        result.or_else(|error| self.fail(step, Some(&path), &error))
    }

    fn event_limit(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        if let Some(events) = &self.control.events {
            let began = self.begin();
            events.take(1, &self.stop_condition());
            self.end(step, began, 0);
        }
        Ok(())
    }

    /// Waits until as many events have occurred as there were operations (or megabytes) since the
    /// last call. Without an event generator there is no limit.
    fn limit(&mut self, step: &FlowopPlan, what: LimitUnit) -> FlowopResult<()> {
        let Some(events) = &self.control.events else { return Ok(()) };
        let now = self.measured_value(step, what);
        let (before, mut bucket) = match self.limits[step.statistics] {
            Some(seen) => seen,
            None => (now, 0),
        };
        let began = self.begin();
        bucket -= i128::from(now - before);
        if bucket < 0 {
            let missing = bucket.unsigned_abs() as u64;
            let (wanted, worth) = match what {
                LimitUnit::Bytes => (missing / EVENT_BYTES + 1, EVENT_BYTES),
                _ => (missing, 1),
            };
            events.take(wanted, &self.stop_condition());
            bucket += i128::from(wanted) * i128::from(worth);
        }
        self.limits[step.statistics] = Some((now, bucket));
        self.end(step, began, 0);
        Ok(())
    }

    /// The value that a limit compares: of its targets in this thread, or of all flowops.
    fn measured_value(&self, step: &FlowopPlan, what: LimitUnit) -> u64 {
        if step.targets.is_empty() {
            return match what {
                LimitUnit::Operations => self.control.operations(),
                LimitUnit::DataOperations => self.control.data_io(),
                LimitUnit::Bytes => self.control.bytes(),
            };
        }
        let cells = step.targets.iter().filter_map(|row| self.counts.cells[*row].as_ref());
        cells
            .map(|cell| if matches!(what, LimitUnit::Bytes) { cell.bytes() } else { cell.count() })
            .sum()
    }

    fn burn_cpu(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let rounds = self.number(step.value);
        let began = self.begin();
        let byte = self.memory.piece(1, &mut self.random);
        for round in 0..rounds {
            byte[0] = std::hint::black_box(round as u8);
        }
        self.end(step, began, 0);
        Ok(())
    }

    fn delay(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let seconds = self.number(step.value);
        let began = self.begin();
        self.control.sleep(seconds);
        self.end(step, began, 0);
        Ok(())
    }

    fn meet(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let (meetings, stopped) = (&self.control.meetings, self.finish_check());
        let amount = self.number(step.value).max(1);
        let began = self.begin();
        match step.kind {
            FlowopKind::Block => meetings.block(step.statistics, self.number, &stopped),
            FlowopKind::SemBlock => meetings.take(step.statistics, self.number, amount, &stopped),
            FlowopKind::Wakeup => step.targets.iter().for_each(|row| meetings.wakeup(*row)),
            _ => {
                for row in &step.targets {
                    meetings.post(*row, amount, step.blocking, &stopped);
                }
            }
        }
        self.end(step, began, 0);
        Ok(())
    }

    /// This operation itself is counted at the next call.
    fn finish_on_count(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let done = self.measured_value(step, LimitUnit::Operations);
        self.finish_if(step, |wanted| done >= wanted)
    }

    fn finish_on_bytes(&mut self, step: &FlowopPlan) -> FlowopResult<()> {
        let done = self.measured_value(step, LimitUnit::Bytes);
        self.finish_if(step, |wanted| done > wanted)
    }

    fn finish_if(&mut self, step: &FlowopPlan, reached: impl Fn(u64) -> bool) -> FlowopResult<()> {
        let wanted = self.number(step.value);
        let began = self.begin();
        self.end(step, began, 0);
        if reached(wanted) { Err(FlowopOutcome::Finished) } else { Ok(()) }
    }
}
