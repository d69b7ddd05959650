//! The memory that all processes of a run share: one memfd, mapped `MAP_SHARED`.
//!
//! | from byte | what |
//! |---|---|
//! | 0 | [`MAGIC`], the length of the plan in bytes, the number of the run, each a u64 in little-endian order |
//! | [`COUNTERS`] | for every number of a system call below [`CALLS`]: calls served here, calls passed on, and calls that reached the kernel with a descriptor of ours; each a u64 |
//! | [`SITE_COUNTERS`] | the same three for each of the first [`SITES`] sites of the plan, in its order |
//! | [`REFERENCES`] | [`CELLS`] numbers of processes that have the open file, each a u32 |
//! | [`OPEN_FILES`] | [`CELLS`] positions and flags of open files, [`CELL`] bytes each |
//! | [`PLAN`] | the plan |
//! | [`images_at`] | code of libraries with their sites replaced ([`crate::image`]); programs map it for itself, private and not to be written |

/// What the memory begins with; another version begins otherwise.
pub const MAGIC: u64 = u64::from_le_bytes(*b"defuse03");
/// Where the length of the plan is.
pub const PLAN_LEN: usize = 8;
/// Where the number of the run is, which no other run at this time has.
pub const RUN_ID: usize = 16;
/// Where the counters begin.
pub const COUNTERS: usize = 4096;
/// How many system calls have counters.
pub const CALLS: usize = 512;
/// Where the counters by site begin.
pub const SITE_COUNTERS: usize = COUNTERS + CALLS * 24;
/// How many sites have counters: the C library has some two hundred.
pub const SITES: usize = 8192;
/// Open files that a run can have at once; beyond it `ENFILE`.
pub const CELLS: usize = 1 << 16;
/// The length in bytes of the cells of an open file.
pub const CELL: usize = 24;
/// Where the numbers of references begin.
pub const REFERENCES: usize = SITE_COUNTERS + SITES * 24;
/// Where positions and flags begin.
pub const OPEN_FILES: usize = REFERENCES + CELLS * 4;
/// Where the plan begins.
pub const PLAN: usize = OPEN_FILES + CELLS * CELL;

/// Where images begin, behind a plan of this length in bytes; on a page.
pub fn images_at(plan_len: usize) -> usize {
    (PLAN + plan_len).next_multiple_of(4096)
}

/// The length of the plan in bytes, from the beginning of the memory ([`head`]); `None` where another
/// version wrote it.
pub fn plan_len(head: &[u8; 24]) -> Option<usize> {
    let number = |from: usize| {
        let bytes = head.get(from..from + 8)?.try_into().ok()?;
        Some(u64::from_le_bytes(bytes))
    };
    if number(0)? != MAGIC {
        return None;
    }
    usize::try_from(number(PLAN_LEN)?).ok()
}

/// Where the processes of a run keep nodes of the kernel for fifos and devices that they open in
/// mounts. Whoever started the run removes it.
pub fn node_directory(uid: u32, run_id: u64) -> String {
    format!("/tmp/.defuse-{uid}-{run_id}")
}

/// What was counted of one system call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls that were served inside of the process.
    pub served: u64,
    /// Calls that the kernel got.
    pub passed: u64,
    /// Calls that the kernel got although they named a descriptor of ours.
    pub missed: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.served += other.served;
        self.passed += other.passed;
        self.missed += other.missed;
    }
}

/// The counts of the call `number` in `bytes`, the beginning of the memory.
pub fn counts(bytes: &[u8], number: usize) -> Counts {
    counts_at(bytes, COUNTERS + number * 24)
}

/// The counts of the site at this place among those of all objects of the plan.
pub fn site_counts(bytes: &[u8], site: usize) -> Counts {
    if site < SITES { counts_at(bytes, SITE_COUNTERS + site * 24) } else { Counts::default() }
}

fn counts_at(bytes: &[u8], start: usize) -> Counts {
    let at = |place: usize| {
        let from = start + place * 8;
        let bytes = bytes.get(from..from + 8).and_then(|bytes| bytes.try_into().ok());
        u64::from_le_bytes(bytes.unwrap_or_default())
    };
    Counts { served: at(0), passed: at(1), missed: at(2) }
}

/// The beginning of the memory of a run with this plan, which itself belongs at [`PLAN`].
pub fn head(plan: &[u8], run_id: u64) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[PLAN_LEN..PLAN_LEN + 8].copy_from_slice(&(plan.len() as u64).to_le_bytes());
    bytes[RUN_ID..RUN_ID + 8].copy_from_slice(&run_id.to_le_bytes());
    bytes
}

/// The plan in `bytes`; `None` where another version wrote them.
pub fn plan(bytes: &[u8]) -> Option<&[u8]> {
    let number = |from: usize| {
        bytes.get(from..from + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes)
    };
    if number(0)? != MAGIC {
        return None;
    }
    bytes.get(PLAN..)?.get(..usize::try_from(number(PLAN_LEN)?).ok()?)
}
