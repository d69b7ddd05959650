//! The memory of operations.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::{FRAME, FrameRun, MemoryRegion};

/// A piece of memory of an operation.
pub enum OperationMemory {
    /// Frames that belong to the operation until it is reaped.
    Frames(FrameRun),
    /// Bytes of frames that others may read meanwhile: for writes only.
    Shared(Arc<FrameRun>, Range<usize>),
    /// Memory of a caller.
    Raw(RawBuf),
    /// Memory whose ownership the caller has passed to the operation.
    Owned(OwnedBuf),
    /// Bytes that others may read meanwhile: for writes only.
    Bytes(Arc<Vec<u8>>, Range<usize>),
}

/// Bytes of a vector that belongs to an operation until it is reaped.
pub struct OwnedBuf {
    /// The first byte, in `vec`. Nothing else accesses these bytes.
    start: *mut u8,
    range: Range<usize>,
    vec: Vec<u8>,
}

// SAFETY: `start` points into `vec`, which may be sent to another thread.
unsafe impl Send for OwnedBuf {}

impl OwnedBuf {
    /// The bytes of `vec` in `range`.
    ///
    /// # Panics
    ///
    /// Panics if the vector is shorter.
    pub fn new(mut vec: Vec<u8>, range: Range<usize>) -> Self {
        let start = vec[range.clone()].as_mut_ptr();
        OwnedBuf { start, range, vec }
    }

    /// The vector.
    pub fn into_vec(self) -> Vec<u8> {
        self.vec
    }
}

/// Memory of a caller. A device uses it in place, or copies it if necessary.
pub struct RawBuf {
    start: *mut u8,
    len: usize,
}

// SAFETY: the caller of `RawBuf::new` has promised that the memory may be used, from any thread,
// until it is given back.
unsafe impl Send for RawBuf {}

impl RawBuf {
    /// `len` bytes from `start` on.
    ///
    /// # Safety
    ///
    /// From now until the operation is reaped (or the buffer dropped without being pushed) the
    /// bytes must stay mapped. During a read, nothing else may access them; during a write, nothing
    /// may change them, and they must be initialized. No peer that is not trusted may share them:
    /// devices copy from them more than once.
    pub unsafe fn new(start: *mut u8, len: usize) -> Self {
        RawBuf { start, len }
    }
}

impl OperationMemory {
    /// Its length in bytes.
    pub fn len(&self) -> usize {
        match self {
            OperationMemory::Frames(frames) => frames.len(),
            OperationMemory::Shared(_, range) => range.len(),
            OperationMemory::Raw(raw) => raw.len,
            OperationMemory::Owned(owned) => owned.range.len(),
            OperationMemory::Bytes(_, range) => range.len(),
        }
    }

    /// True where it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, for a device that copies them.
    pub fn bytes(&self) -> &[u8] {
        match self {
            OperationMemory::Frames(frames) => frames,
            OperationMemory::Shared(frames, range) => &frames[range.clone()],
            // SAFETY: the bytes are mapped and do not change (`RawBuf::new`).
            OperationMemory::Raw(raw) => unsafe { std::slice::from_raw_parts(raw.start, raw.len) },
            OperationMemory::Owned(owned) => &owned.vec[owned.range.clone()],
            OperationMemory::Bytes(bytes, range) => &bytes[range.clone()],
        }
    }

    /// The bytes, to be filled by a device that copies; `None` where others read them.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        match self {
            OperationMemory::Frames(frames) => Some(frames),
            OperationMemory::Shared(..) | OperationMemory::Bytes(..) => None,
            OperationMemory::Owned(owned) => Some(&mut owned.vec[owned.range.clone()]),
            OperationMemory::Raw(raw) => {
                // SAFETY: the bytes are mapped, and nothing else uses them during a read
                // (`RawBuf::new`).
                Some(unsafe { std::slice::from_raw_parts_mut(raw.start, raw.len) })
            }
        }
    }

    pub(crate) fn start(&self) -> *mut u8 {
        match self {
            OperationMemory::Frames(frames) => frames.start(),
            OperationMemory::Shared(frames, range) => frames.start().wrapping_add(range.start),
            OperationMemory::Raw(raw) => raw.start,
            OperationMemory::Owned(owned) => owned.start,
            // The device only reads them: `BlockOpKind::check` refuses such memory for reads.
            OperationMemory::Bytes(bytes, range) => bytes[range.clone()].as_ptr().cast_mut(),
        }
    }

    /// The region that contains the memory, if any, and its offset in the region in bytes.
    pub fn region_and_offset(&self) -> Option<(&Arc<MemoryRegion>, usize)> {
        match self {
            OperationMemory::Frames(frames) => {
                Some((frames.region(), frames.index() as usize * FRAME))
            }
            OperationMemory::Shared(frames, range) => {
                Some((frames.region(), frames.index() as usize * FRAME + range.start))
            }
            OperationMemory::Raw(_) | OperationMemory::Owned(_) | OperationMemory::Bytes(..) => {
                None
            }
        }
    }

    /// The number of the region that contains the memory, if any.
    pub(crate) fn region(&self) -> Option<u64> {
        match self {
            OperationMemory::Frames(frames) => Some(frames.region().id()),
            OperationMemory::Shared(frames, _) => Some(frames.region().id()),
            OperationMemory::Raw(_) | OperationMemory::Owned(_) | OperationMemory::Bytes(..) => {
                None
            }
        }
    }
}

impl fmt::Debug for OperationMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            OperationMemory::Frames(_) => "Frames",
            OperationMemory::Shared(..) => "Shared",
            OperationMemory::Raw(_) => "Raw",
            OperationMemory::Owned(_) => "Owned",
            OperationMemory::Bytes(..) => "Bytes",
        };
        write!(f, "{kind}({} bytes)", self.len())
    }
}

/// The memory of one operation, in order. A single piece takes no allocation.
#[derive(Debug, Default)]
pub enum MemorySegments {
    /// No memory.
    #[default]
    None,
    /// One piece.
    One(OperationMemory),
    /// Several pieces.
    Many(Vec<OperationMemory>),
}

impl MemorySegments {
    /// The pieces.
    pub fn pieces(&self) -> &[OperationMemory] {
        match self {
            MemorySegments::None => &[],
            MemorySegments::One(memory) => std::slice::from_ref(memory),
            MemorySegments::Many(memory) => memory,
        }
    }

    /// The pieces, to be filled.
    pub fn pieces_mut(&mut self) -> &mut [OperationMemory] {
        match self {
            MemorySegments::None => &mut [],
            MemorySegments::One(memory) => std::slice::from_mut(memory),
            MemorySegments::Many(memory) => memory,
        }
    }

    /// The number of pieces.
    pub fn count(&self) -> usize {
        self.pieces().len()
    }

    /// The length of all pieces, in bytes.
    pub fn bytes(&self) -> usize {
        self.pieces().iter().map(OperationMemory::len).sum()
    }

    /// The vector, if the only piece is a part of a vector that the operation owns.
    pub fn into_vec(self) -> Option<Vec<u8>> {
        match self {
            MemorySegments::One(OperationMemory::Owned(owned)) => Some(owned.into_vec()),
            _ => None,
        }
    }

    /// The frames, where the only piece is owned frames.
    pub fn into_frames(self) -> Option<FrameRun> {
        match self {
            MemorySegments::One(OperationMemory::Frames(frames)) => Some(frames),
            _ => None,
        }
    }
}

impl From<OwnedBuf> for MemorySegments {
    fn from(owned: OwnedBuf) -> Self {
        MemorySegments::One(OperationMemory::Owned(owned))
    }
}

impl From<FrameRun> for MemorySegments {
    fn from(frames: FrameRun) -> Self {
        MemorySegments::One(OperationMemory::Frames(frames))
    }
}

impl From<RawBuf> for MemorySegments {
    fn from(raw: RawBuf) -> Self {
        MemorySegments::One(OperationMemory::Raw(raw))
    }
}

impl From<Vec<OperationMemory>> for MemorySegments {
    fn from(memory: Vec<OperationMemory>) -> Self {
        MemorySegments::Many(memory)
    }
}
