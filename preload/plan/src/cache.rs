//! A cache of analysis results for later runs.
//!
//! It has one file for each object file, named by the build id, in a directory that belongs to the
//! user. All numbers are u64 in little-endian order:
//!
//! | what | length |
//! |---|---|
//! | `dfsites7` | 8 |
//! | digest (FNV-1a) of all that follows | 8 |
//! | build id, with its length before it | 8 and its length |
//! | size, seconds and nanoseconds of the last change of the object file | 24 |
//! | number of sites | 8 |
//! | sites, as in the plan | 32 each |
//!
//! The cache is optional. A file is ignored and replaced if it cannot be read, has another version,
//! is damaged, or describes an object file that has changed. If another user than root and the
//! owner could have written to the directory, it is neither read nor written.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{Mode, OFlags};

use crate::codec::{MalformedState, ValueReader, ValueWriter};
use crate::plan::{PatchSite, decode_sites, encode_sites};
use crate::trusted_directory::{create_settled, find_trusted, is_trusted, open_trusted};

/// The first bytes of a file. The digit is the version of the analysis.
const MAGIC: &[u8; 8] = b"dfsites7";
/// Maximum number of files. Beyond it, the older half is removed.
const MOST_FILES: usize = 1024;
/// Maximum size of a file that is read, in bytes.
const MOST_BYTES: u64 = 16 << 20;
/// Maximum size of a build id in bytes. Linkers use 20.
const MOST_ID: usize = 64;

/// Size and time of an object file, by which a change is detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    size: u64,
    seconds: i64,
    nanoseconds: i64,
}

impl FileStamp {
    /// The stamp of a file.
    pub fn from_metadata(meta: &Metadata) -> Self {
        FileStamp { size: meta.size(), seconds: meta.mtime(), nanoseconds: meta.mtime_nsec() }
    }

    fn numbers(self) -> [u64; 3] {
        [self.size, self.seconds as u64, self.nanoseconds as u64]
    }
}

/// The directory of the cache.
#[derive(Clone, Debug)]
pub struct AnalysisCache {
    directory: PathBuf,
}

impl AnalysisCache {
    /// The cache of the user: `$XDG_CACHE_HOME/defuse`, or `~/.cache/defuse`. Creates missing
    /// directories, except for `$XDG_CACHE_HOME` and the home directory themselves. Returns `None`
    /// if neither variable is an absolute path, if the directory cannot be created, or if other
    /// users could have written to it.
    pub fn open_for_user() -> Option<Self> {
        let variable = |name: &str| {
            let path = PathBuf::from(std::env::var_os(name)?);
            path.is_absolute().then_some(path)
        };
        match variable("XDG_CACHE_HOME") {
            Some(base) => Self::open_below(&base),
            None => Self::open_in_home(&variable("HOME")?),
        }
    }

    /// The cache of the user with this home directory, which is not created.
    fn open_in_home(home: &Path) -> Option<Self> {
        Self::open_below(&create_settled(&home.join(".cache")).ok()?)
    }

    /// The cache in `base`, unless another user could exchange that directory for a link. After
    /// su(1) or `sudo -E`, the variables belong to another user: old files are removed from the
    /// directory by their paths.
    fn open_below(base: &Path) -> Option<Self> {
        Self::open_at(&find_trusted(base).ok()?.join("defuse"))
    }

    /// The cache in `directory`, which is created if its parent exists; otherwise like
    /// [`open_for_user`](AnalysisCache::open_for_user).
    pub fn open_at(directory: &Path) -> Option<Self> {
        let _ = DirBuilder::new().mode(0o700).create(directory);
        // An existing one that is not writable can still be read.
        let meta = fs::symlink_metadata(directory).ok()?;
        let good = meta.is_dir() && is_trusted(&meta);
        good.then(|| AnalysisCache { directory: directory.to_owned() })
    }

    /// The sites of the object file with this build id and stamp; `None` if they are not known.
    pub fn sites(&self, build_id: &[u8], stamp: FileStamp) -> Option<Vec<PatchSite>> {
        let mut file = open_trusted(&self.path(build_id)?).ok()?;
        let size = file.metadata().ok()?.size();
        if size > MOST_BYTES {
            return None;
        }
        let mut bytes = Vec::with_capacity(size as usize);
        file.read_to_end(&mut bytes).ok()?;
        decode(&bytes, build_id, stamp).ok()
    }

    /// Stores the sites of an object file. After an error the next run analyses it again.
    pub fn keep(&self, build_id: &[u8], stamp: FileStamp, sites: &[PatchSite]) {
        let Some(path) = self.path(build_id) else { return };
        if fs::symlink_metadata(&path).is_ok_and(|meta| !is_trusted(&meta)) {
            return;
        }
        self.make_room();
        // A reader sees either the whole new file or the previous one.
        let new = self.directory.join(format!("new-{}", std::process::id()));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let _ = fs::remove_file(&new);
        let Ok(fd) = rustix::fs::open(&new, flags, Mode::from_raw_mode(0o600)) else { return };
        let written = File::from(fd).write_all(&encode(build_id, stamp, sites));
        if written.and_then(|()| fs::rename(&new, &path)).is_err() {
            let _ = fs::remove_file(&new);
        }
    }

    fn path(&self, build_id: &[u8]) -> Option<PathBuf> {
        if build_id.is_empty() || build_id.len() > MOST_ID {
            return None;
        }
        let name: String = build_id.iter().map(|byte| format!("{byte:02x}")).collect();
        Some(self.directory.join(name))
    }

    /// Removes old files: each build of a program has a new build id.
    fn make_room(&self) {
        let Ok(entries) = fs::read_dir(&self.directory) else { return };
        let entries: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        if entries.len() < MOST_FILES {
            return;
        }
        let age = |path: &PathBuf| fs::symlink_metadata(path).and_then(|meta| meta.modified());
        let mut all: Vec<(SystemTime, PathBuf)> =
            entries.into_iter().filter_map(|path| Some((age(&path).ok()?, path))).collect();
        all.sort();
        for (_, path) in &all[..all.len() / 2] {
            let _ = fs::remove_file(path);
        }
    }
}

fn encode(build_id: &[u8], stamp: FileStamp, sites: &[PatchSite]) -> Vec<u8> {
    let mut body = ValueWriter::default();
    body.string(build_id);
    stamp.numbers().into_iter().for_each(|number| body.number(number));
    encode_sites(&mut body, sites);
    [MAGIC, &digest(&body.bytes).to_le_bytes()[..], &body.bytes].concat()
}

fn decode(
    bytes: &[u8],
    build_id: &[u8],
    stamp: FileStamp,
) -> Result<Vec<PatchSite>, MalformedState> {
    let mut from = ValueReader { bytes: bytes.strip_prefix(MAGIC).ok_or(MalformedState)? };
    if from.number()? != digest(from.bytes) || from.string()? != build_id {
        return Err(MalformedState);
    }
    for number in stamp.numbers() {
        if from.number()? != number {
            return Err(MalformedState);
        }
    }
    let sites = decode_sites(&mut from)?;
    if from.bytes.is_empty() { Ok(sites) } else { Err(MalformedState) }
}

/// FNV-1a with 64 bits. It detects damage, and does not protect against attackers.
fn digest(bytes: &[u8]) -> u64 {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    const ID: &[u8] = &[0xab, 1, 2];
    const STAMP: FileStamp = FileStamp { size: 9, seconds: -4, nanoseconds: 5 };

    fn sites() -> Vec<PatchSite> {
        let site =
            PatchSite { address: 77, len: 7, syscall_at: 5, number: Some(0), bytes: [9; 16] };
        vec![site, PatchSite { number: None, ..site }]
    }

    /// A cache that knows [`sites`], and where its file is.
    fn cache() -> (tempfile::TempDir, AnalysisCache, PathBuf) {
        let place = tempfile::tempdir().unwrap();
        let cache = AnalysisCache::open_at(&place.path().join("defuse")).unwrap();
        cache.keep(ID, STAMP, &sites());
        let path = cache.directory.join("ab0102");
        (place, cache, path)
    }

    #[test]
    fn what_was_found_is_found_again() {
        let (_place, cache, path) = cache();
        assert_eq!(cache.sites(ID, STAMP), Some(sites()));
        assert_eq!(cache.sites(&[0xab, 1, 3], STAMP), None);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&cache.directory).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn a_file_that_changed_and_kept_its_build_id_is_not_known() {
        let (_place, cache, _path) = cache();
        for other in [
            FileStamp { size: 8, ..STAMP },
            FileStamp { seconds: -5, ..STAMP },
            FileStamp { nanoseconds: 6, ..STAMP },
        ] {
            assert_eq!(cache.sites(ID, other), None);
        }
    }

    #[test]
    fn what_is_damaged_or_of_another_version_is_ignored_and_written_anew() {
        let (_place, cache, path) = cache();
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            fs::write(&path, &bad).unwrap();
            assert_eq!(cache.sites(ID, STAMP), None, "byte {at}");
            fs::write(&path, &good[..at]).unwrap();
            assert_eq!(cache.sites(ID, STAMP), None, "{at} bytes");
        }
        fs::write(&path, [&good[..], b"x"].concat()).unwrap();
        assert_eq!(cache.sites(ID, STAMP), None, "a byte too many");
        // The file of another version is valid, and begins differently.
        fs::write(&path, [b"dfsites0", &good[8..]].concat()).unwrap();
        assert_eq!(cache.sites(ID, STAMP), None);
        cache.keep(ID, STAMP, &sites());
        assert_eq!(cache.sites(ID, STAMP), Some(sites()));
    }

    #[test]
    fn what_others_could_have_written_is_refused() {
        let (_place, cache, path) = cache();
        let directory = cache.directory.clone();
        for (what, mode) in [(&path, 0o620), (&path, 0o602)] {
            fs::set_permissions(what, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(cache.sites(ID, STAMP), None, "{mode:o}");
            cache.keep(ID, STAMP, &[]);
            assert_eq!(fs::metadata(what).unwrap().mode() & 0o777, mode, "it is left as it is");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(cache.sites(ID, STAMP), Some(sites()));
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(AnalysisCache::open_at(&directory).is_none());
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(AnalysisCache::open_at(&directory).is_some());
        if chown(&path, Some(65534), None).is_err() {
            println!("skipped: files of other users: needs root");
            return;
        }
        assert_eq!(cache.sites(ID, STAMP), None);
        chown(&directory, Some(65534), None).unwrap();
        assert!(AnalysisCache::open_at(&directory).is_none());
    }

    /// A run of root with `XDG_CACHE_HOME` of another user removed old files from the directory to
    /// which that user's link led.
    #[test]
    fn a_cache_that_another_user_can_exchange_is_not_used() {
        let place = tempfile::tempdir().unwrap();
        let (theirs, own) = (place.path().join("theirs"), place.path().join("own"));
        fs::create_dir(&theirs).unwrap();
        fs::create_dir(&own).unwrap();
        symlink(&own, theirs.join("link")).unwrap();
        fs::create_dir(theirs.join("inner")).unwrap();
        for (base, mode, is_used) in [
            (own.clone(), 0o755, true),
            (theirs.join("inner"), 0o755, true),
            (theirs.join("inner"), 0o777, false),
            (theirs.join("link"), 0o777, true),
        ] {
            fs::set_permissions(&theirs, fs::Permissions::from_mode(mode)).unwrap();
            // A link is followed once, to a directory that stays.
            let cache = AnalysisCache::open_below(&base);
            assert_eq!(cache.is_some(), is_used, "{base:?} {mode:o}");
            if let Some(cache) = cache {
                assert_eq!(cache.directory, base.canonicalize().unwrap().join("defuse"));
            }
        }
        if chown(&theirs, Some(65534), None).is_ok() {
            fs::set_permissions(&theirs, fs::Permissions::from_mode(0o755)).unwrap();
            assert!(AnalysisCache::open_below(&theirs.join("inner")).is_none());
        }
    }

    /// `HOME=/somewhere/else defuse run ...` made that directory, and all above it.
    #[test]
    fn no_home_is_made() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path().join("missing/home");
        assert!(AnalysisCache::open_in_home(&home).is_none());
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
        fs::create_dir_all(&home).unwrap();
        assert!(AnalysisCache::open_in_home(&home).is_some());
        assert!(home.join(".cache/defuse").is_dir());
    }

    #[test]
    fn links_are_not_followed() {
        let (place, cache, path) = cache();
        let moved = place.path().join("moved");
        fs::rename(&path, &moved).unwrap();
        symlink(&moved, &path).unwrap();
        assert_eq!(cache.sites(ID, STAMP), None);
        let link = place.path().join("link");
        symlink(&cache.directory, &link).unwrap();
        assert!(AnalysisCache::open_at(&link).is_none());
    }

    #[test]
    fn the_files_of_old_programs_go() {
        let place = tempfile::tempdir().unwrap();
        let cache = AnalysisCache::open_at(place.path()).unwrap();
        for number in 0..MOST_FILES as u64 + 10 {
            cache.keep(&number.to_le_bytes(), STAMP, &[]);
        }
        let left = fs::read_dir(place.path()).unwrap().count();
        assert!((MOST_FILES / 4..MOST_FILES).contains(&left), "{left}");
        let newest = (MOST_FILES as u64 + 9).to_le_bytes();
        assert_eq!(cache.sites(&newest, STAMP), Some(Vec::new()));
    }
}
