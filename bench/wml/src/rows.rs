//! The built-in workloads, and the 45 rows of *To FUSE or Not to FUSE* (FAST '17, table 3), which
//! are these workloads with variables.

/// A built-in workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuiltinWorkload {
    /// Its name, which is the name of its file without `.f`.
    pub name: &'static str,
    /// A short description.
    pub about: &'static str,
    /// Its file.
    pub text: &'static str,
}

macro_rules! builtins {
    ($($name:literal: $about:literal,)*) => {
        /// All built-in workloads.
        const BUILTINS: &[BuiltinWorkload] = &[$(BuiltinWorkload {
            name: $name,
            about: $about,
            text: include_str!(concat!("../workloads/", $name, ".f")),
        },)*];
    };
}

builtins! {
    "seq-rd": "rows 1-12: read files from beginning to end",
    "rnd-rd": "rows 13-20: read one file at random offsets",
    "seq-wr": "rows 21-28: write new files from beginning to end",
    "rnd-wr": "rows 29-36: write one file at random offsets",
    "files-cr": "rows 37-38: make many small files",
    "files-rd": "rows 39-40: read many small files",
    "files-del": "rows 41-42: delete many small files",
    "file-server": "row 43: make, extend, read and delete files",
    "mail-server": "row 44: deliver, answer and read mail, with fsync",
    "web-server": "row 45: read pages, write one log",
    "fileserver": "a file server of 10,000 files, for a minute",
    "varmail": "a mail server of 1,000 files, for a minute",
    "webserver": "a web server of 1,000 files, for a minute",
    "webproxy": "a web proxy of 10,000 files, for a minute",
}

/// All built-in workloads.
pub fn builtins() -> &'static [BuiltinWorkload] {
    BUILTINS
}

/// The workload called `name`.
pub fn builtin(name: &str) -> Option<&'static BuiltinWorkload> {
    BUILTINS.iter().find(|builtin| builtin.name == name)
}

/// The device of a row, on which its amount of work depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowDevice {
    /// A disk.
    Hdd,
    /// A solid state drive.
    Ssd,
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkloadRow {
    /// Its number, 1 to 45.
    pub number: u32,
    /// Its name in the table.
    pub name: &'static str,
    /// Its workload.
    pub workload: &'static str,
    /// Variables of the workload, as `NAME=VALUE`.
    pub variables: &'static [&'static str],
    /// Further variables on a disk. For rows 44 and 45, only the amount of work on a solid state
    /// drive is known, and is used for a disk, too.
    pub hdd: &'static [&'static str],
    /// Further variables on a solid state drive.
    pub ssd: &'static [&'static str],
}

impl WorkloadRow {
    /// The row with that number.
    pub fn find_by_number(number: u32) -> Option<&'static WorkloadRow> {
        ROWS.iter().find(|row| row.number == number)
    }

    /// The row with that name.
    pub fn find_by_name(name: &str) -> Option<&'static WorkloadRow> {
        ROWS.iter().find(|row| row.name == name)
    }

    /// All variables on a device, as `NAME=VALUE`.
    pub fn variables_on(&self, device: RowDevice) -> Vec<String> {
        let more = if device == RowDevice::Hdd { self.hdd } else { self.ssd };
        self.variables.iter().chain(more).map(|text| (*text).to_owned()).collect()
    }
}

macro_rules! rows {
    ($($number:literal $name:literal $workload:literal
        [$($all:literal)*] hdd [$($hdd:literal)*] ssd [$($ssd:literal)*];)*) => {
        /// The 45 rows, in the order of the table.
        pub const ROWS: &[WorkloadRow] = &[$(WorkloadRow {
            number: $number,
            name: $name,
            workload: $workload,
            variables: &[$($all),*],
            hdd: &[$($hdd),*],
            ssd: &[$($ssd),*],
        },)*];
    };
}

rows! {
    1 "seq-rd-4KB-1th-1f" "seq-rd"
        ["iosize=4k" "reads=15728640"] hdd [] ssd [];
    2 "seq-rd-32KB-1th-1f" "seq-rd"
        ["iosize=32k" "reads=1966080"] hdd [] ssd [];
    3 "seq-rd-128KB-1th-1f" "seq-rd"
        ["iosize=128k" "reads=491520"] hdd [] ssd [];
    4 "seq-rd-1MB-1th-1f" "seq-rd"
        ["iosize=1m" "reads=61440"] hdd [] ssd [];
    5 "seq-rd-4KB-32th-1f" "seq-rd"
        ["nthreads=32" "iosize=4k" "reads=15728640"] hdd [] ssd [];
    6 "seq-rd-32KB-32th-1f" "seq-rd"
        ["nthreads=32" "iosize=32k" "reads=1966080"] hdd [] ssd [];
    7 "seq-rd-128KB-32th-1f" "seq-rd"
        ["nthreads=32" "iosize=128k" "reads=491520"] hdd [] ssd [];
    8 "seq-rd-1MB-32th-1f" "seq-rd"
        ["nthreads=32" "iosize=1m" "reads=61440"] hdd [] ssd [];
    9 "seq-rd-4KB-32th-32f" "seq-rd"
        ["nthreads=32" "nfiles=32" "filesize=2g" "iosize=4k" "reads=524288"] hdd [] ssd [];
    10 "seq-rd-32KB-32th-32f" "seq-rd"
        ["nthreads=32" "nfiles=32" "filesize=2g" "iosize=32k" "reads=65536"] hdd [] ssd [];
    11 "seq-rd-128KB-32th-32f" "seq-rd"
        ["nthreads=32" "nfiles=32" "filesize=2g" "iosize=128k" "reads=16384"] hdd [] ssd [];
    12 "seq-rd-1MB-32th-32f" "seq-rd"
        ["nthreads=32" "nfiles=32" "filesize=2g" "iosize=1m" "reads=2048"] hdd [] ssd [];
    13 "rnd-rd-4KB-1th-1f" "rnd-rd"
        ["iosize=4k"] hdd ["reads=262144"] ssd ["reads=15728640"];
    14 "rnd-rd-32KB-1th-1f" "rnd-rd"
        ["iosize=32k"] hdd ["reads=262144"] ssd ["reads=1966080"];
    15 "rnd-rd-128KB-1th-1f" "rnd-rd"
        ["iosize=128k"] hdd ["reads=196608"] ssd ["reads=491520"];
    16 "rnd-rd-1MB-1th-1f" "rnd-rd"
        ["iosize=1m"] hdd ["reads=61440"] ssd ["reads=61440"];
    17 "rnd-rd-4KB-32th-1f" "rnd-rd"
        ["nthreads=32" "iosize=4k"] hdd ["reads=8192"] ssd ["reads=491520"];
    18 "rnd-rd-32KB-32th-1f" "rnd-rd"
        ["nthreads=32" "iosize=32k"] hdd ["reads=8192"] ssd ["reads=61440"];
    19 "rnd-rd-128KB-32th-1f" "rnd-rd"
        ["nthreads=32" "iosize=128k"] hdd ["reads=6144"] ssd ["reads=15360"];
    20 "rnd-rd-1MB-32th-1f" "rnd-rd"
        ["nthreads=32" "iosize=1m"] hdd ["reads=1920"] ssd ["reads=1920"];
    21 "seq-wr-4KB-1th-1f" "seq-wr"
        ["iosize=4k" "writes=15728640"] hdd [] ssd [];
    22 "seq-wr-32KB-1th-1f" "seq-wr"
        ["iosize=32k" "writes=1966080"] hdd [] ssd [];
    23 "seq-wr-128KB-1th-1f" "seq-wr"
        ["iosize=128k" "writes=491520"] hdd [] ssd [];
    24 "seq-wr-1MB-1th-1f" "seq-wr"
        ["iosize=1m" "writes=61440"] hdd [] ssd [];
    25 "seq-wr-4KB-32th-32f" "seq-wr"
        ["nthreads=32" "nfiles=32" "filesize=2g" "iosize=4k" "writes=524288"] hdd [] ssd [];
    26 "seq-wr-32KB-32th-32f" "seq-wr"
        ["nthreads=32" "nfiles=32" "filesize=2g" "iosize=32k" "writes=65536"] hdd [] ssd [];
    27 "seq-wr-128KB-32th-32f" "seq-wr"
        ["nthreads=32" "nfiles=32" "filesize=2g" "iosize=128k" "writes=16384"] hdd [] ssd [];
    28 "seq-wr-1MB-32th-32f" "seq-wr"
        ["nthreads=32" "nfiles=32" "filesize=2g" "iosize=1m" "writes=2048"] hdd [] ssd [];
    29 "rnd-wr-4KB-1th-1f" "rnd-wr"
        ["iosize=4k" "writes=1572864"] hdd [] ssd [];
    30 "rnd-wr-32KB-1th-1f" "rnd-wr"
        ["iosize=32k" "writes=983040"] hdd [] ssd [];
    31 "rnd-wr-128KB-1th-1f" "rnd-wr"
        ["iosize=128k" "writes=491520"] hdd [] ssd [];
    32 "rnd-wr-1MB-1th-1f" "rnd-wr"
        ["iosize=1m" "writes=61440"] hdd [] ssd [];
    33 "rnd-wr-4KB-32th-1f" "rnd-wr"
        ["nthreads=32" "iosize=4k" "writes=49152"] hdd [] ssd [];
    34 "rnd-wr-32KB-32th-1f" "rnd-wr"
        ["nthreads=32" "iosize=32k" "writes=30720"] hdd [] ssd [];
    35 "rnd-wr-128KB-32th-1f" "rnd-wr"
        ["nthreads=32" "iosize=128k" "writes=15360"] hdd [] ssd [];
    36 "rnd-wr-1MB-32th-1f" "rnd-wr"
        ["nthreads=32" "iosize=1m" "writes=1920"] hdd [] ssd [];
    37 "files-cr-1th" "files-cr"
        ["nthreads=1"] hdd [] ssd [];
    38 "files-cr-32th" "files-cr"
        ["nthreads=32"] hdd [] ssd [];
    39 "files-rd-1th" "files-rd"
        ["nthreads=1"] hdd ["ops=1200000"] ssd ["ops=4000000"];
    40 "files-rd-32th" "files-rd"
        ["nthreads=32"] hdd ["ops=1200000"] ssd ["ops=4000000"];
    41 "files-del-1th" "files-del"
        ["nthreads=1"] hdd ["nfiles=2000000"] ssd ["nfiles=4000000"];
    42 "files-del-32th" "files-del"
        ["nthreads=32"] hdd ["nfiles=2000000"] ssd ["nfiles=4000000"];
    43 "file-server" "file-server"
        [] hdd ["ops=1000000"] ssd ["ops=3000000"];
    44 "mail-server" "mail-server"
        [] hdd [] ssd [];
    45 "web-server" "web-server"
        [] hdd [] ssd [];
}
