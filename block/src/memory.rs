//! The memory of operations.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::{FRAME, Frames, Region};

/// A piece of memory of an operation.
pub enum Memory {
    /// Frames that belong to the operation until it is reaped.
    Frames(Frames),
    /// Bytes of frames that others may read meanwhile: for writes only.
    Shared(Arc<Frames>, Range<usize>),
    /// Memory of a caller.
    Raw(RawBuf),
    /// Memory that was given away for the operation.
    Owned(OwnedBuf),
    /// Bytes that others may read meanwhile: for writes only.
    Bytes(Arc<Vec<u8>>, Range<usize>),
}

/// Bytes of a vector that belongs to an operation until it is reaped.
pub struct OwnedBuf {
    /// The first of them, in `vec`, which nobody else touches.
    start: *mut u8,
    range: Range<usize>,
    vec: Vec<u8>,
}

// SAFETY: `start` points into `vec`, which may go to another thread.
unsafe impl Send for OwnedBuf {}

impl OwnedBuf {
    /// The bytes of `vec` in `range`.
    ///
    /// # Panics
    ///
    /// Panics if it has fewer.
    pub fn new(mut vec: Vec<u8>, range: Range<usize>) -> Self {
        let start = vec[range.clone()].as_mut_ptr();
        OwnedBuf { start, range, vec }
    }

    /// The vector.
    pub fn into_vec(self) -> Vec<u8> {
        self.vec
    }
}

/// Memory of a caller that a device uses in place, or copies where it must.
pub struct RawBuf {
    start: *mut u8,
    len: usize,
}

// SAFETY: whoever made it has promised that the memory may be used until it is given back, from any
// thread.
unsafe impl Send for RawBuf {}

impl RawBuf {
    /// `len` bytes from `start` on.
    ///
    /// # Safety
    ///
    /// From now until the operation is reaped (or the buffer dropped without being pushed) the bytes must
    /// stay mapped. For a read nobody else may use them; for a write nobody may change them, and they must
    /// be initialized. No peer that is not trusted may share them: devices copy from them more than once.
    pub unsafe fn new(start: *mut u8, len: usize) -> Self {
        RawBuf { start, len }
    }
}

impl Memory {
    /// Its length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Memory::Frames(frames) => frames.len(),
            Memory::Shared(_, range) => range.len(),
            Memory::Raw(raw) => raw.len,
            Memory::Owned(owned) => owned.range.len(),
            Memory::Bytes(_, range) => range.len(),
        }
    }

    /// True where it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, for a device that copies them.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Memory::Frames(frames) => frames,
            Memory::Shared(frames, range) => &frames[range.clone()],
            // SAFETY: the bytes are mapped and nobody changes them (`RawBuf::new`).
            Memory::Raw(raw) => unsafe { std::slice::from_raw_parts(raw.start, raw.len) },
            Memory::Owned(owned) => &owned.vec[owned.range.clone()],
            Memory::Bytes(bytes, range) => &bytes[range.clone()],
        }
    }

    /// The bytes, to be filled by a device that copies; `None` where others read them.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        match self {
            Memory::Frames(frames) => Some(frames),
            Memory::Shared(..) | Memory::Bytes(..) => None,
            Memory::Owned(owned) => Some(&mut owned.vec[owned.range.clone()]),
            // SAFETY: the bytes are mapped and nobody else uses them during a read (`RawBuf::new`).
            Memory::Raw(raw) => Some(unsafe { std::slice::from_raw_parts_mut(raw.start, raw.len) }),
        }
    }

    pub(crate) fn start(&self) -> *mut u8 {
        match self {
            Memory::Frames(frames) => frames.start(),
            Memory::Shared(frames, range) => frames.start().wrapping_add(range.start),
            Memory::Raw(raw) => raw.start,
            Memory::Owned(owned) => owned.start,
            // Only read: `OpKind::check` refuses it for reads.
            Memory::Bytes(bytes, range) => bytes[range.clone()].as_ptr().cast_mut(),
        }
    }

    /// The region that holds it, if any, and the byte of the region at which it begins.
    pub fn place(&self) -> Option<(&Arc<Region>, usize)> {
        match self {
            Memory::Frames(frames) => Some((frames.region(), frames.index() as usize * FRAME)),
            Memory::Shared(frames, range) => {
                Some((frames.region(), frames.index() as usize * FRAME + range.start))
            }
            Memory::Raw(_) | Memory::Owned(_) | Memory::Bytes(..) => None,
        }
    }

    /// The region that holds it, if any.
    pub(crate) fn region(&self) -> Option<u64> {
        match self {
            Memory::Frames(frames) => Some(frames.region().id()),
            Memory::Shared(frames, _) => Some(frames.region().id()),
            Memory::Raw(_) | Memory::Owned(_) | Memory::Bytes(..) => None,
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Memory::Frames(_) => "Frames",
            Memory::Shared(..) => "Shared",
            Memory::Raw(_) => "Raw",
            Memory::Owned(_) => "Owned",
            Memory::Bytes(..) => "Bytes",
        };
        write!(f, "{kind}({} bytes)", self.len())
    }
}

/// The memory of one operation, in order. A single piece takes no allocation.
#[derive(Debug, Default)]
pub enum Segments {
    /// No memory.
    #[default]
    None,
    /// One piece.
    One(Memory),
    /// Several pieces.
    Many(Vec<Memory>),
}

impl Segments {
    /// The pieces.
    pub fn pieces(&self) -> &[Memory] {
        match self {
            Segments::None => &[],
            Segments::One(memory) => std::slice::from_ref(memory),
            Segments::Many(memory) => memory,
        }
    }

    /// The pieces, to be filled.
    pub fn pieces_mut(&mut self) -> &mut [Memory] {
        match self {
            Segments::None => &mut [],
            Segments::One(memory) => std::slice::from_mut(memory),
            Segments::Many(memory) => memory,
        }
    }

    /// How many pieces there are.
    pub fn count(&self) -> usize {
        self.pieces().len()
    }

    /// The length of all pieces, in bytes.
    pub fn bytes(&self) -> usize {
        self.pieces().iter().map(Memory::len).sum()
    }

    /// The vector, where the only piece is a part of one that was given away.
    pub fn into_vec(self) -> Option<Vec<u8>> {
        match self {
            Segments::One(Memory::Owned(owned)) => Some(owned.into_vec()),
            _ => None,
        }
    }

    /// The frames, where the only piece is owned frames.
    pub fn into_frames(self) -> Option<Frames> {
        match self {
            Segments::One(Memory::Frames(frames)) => Some(frames),
            _ => None,
        }
    }
}

impl From<OwnedBuf> for Segments {
    fn from(owned: OwnedBuf) -> Self {
        Segments::One(Memory::Owned(owned))
    }
}

impl From<Frames> for Segments {
    fn from(frames: Frames) -> Self {
        Segments::One(Memory::Frames(frames))
    }
}

impl From<RawBuf> for Segments {
    fn from(raw: RawBuf) -> Self {
        Segments::One(Memory::Raw(raw))
    }
}

impl From<Vec<Memory>> for Segments {
    fn from(memory: Vec<Memory>) -> Self {
        Segments::Many(memory)
    }
}
