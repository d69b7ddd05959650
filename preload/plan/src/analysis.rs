//! The analysis of a program or library by its file: build id, sites of system calls, imports.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use object::elf::{self, FileHeader64};
use object::read::elf::{Dyn, ElfFile64, FileHeader, ProgramHeader};
use object::read::{ReadCache, ReadRef};
use object::{LittleEndian, Object, ObjectSection, ObjectSymbol};

use crate::cache::{Cache, Stamp};
use crate::calls;
use crate::image::{self, CodeSegment, PatchedImage};
use crate::plan::{ObjectSites, Site};
use crate::scan::{self, Found};

/// Why a file was not understood.
#[derive(Debug)]
pub enum Error {
    /// It could not be read.
    Io(PathBuf, std::io::Error),
    /// It is no ELF file for x86-64.
    Foreign(PathBuf),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io(path, error) => write!(f, "{}: {error}", path.display()),
            Error::Foreign(path) => {
                write!(
                    f,
                    "{}: not a 64-bit x86-64 ELF file: only those are analysed",
                    path.display()
                )
            }
        }
    }
}

impl std::error::Error for Error {}

/// An object file.
#[derive(Clone, Debug, Default)]
pub struct Binary {
    /// Where it was read.
    pub path: PathBuf,
    /// Its build id; empty where it has none.
    pub build_id: Vec<u8>,
    /// The program interpreter; `None` for a static program and for libraries.
    pub interpreter: Option<PathBuf>,
    /// The file is a program that is linked statically.
    pub is_static: bool,
    /// Libraries that it needs, by name.
    pub needed: Vec<String>,
    /// Directories that it looks for them in before the usual ones.
    pub run_path: Vec<String>,
    /// Dynamic symbols that it takes from others, without versions.
    pub imports: BTreeSet<String>,
    /// Dynamic symbols that it gives to others, without versions.
    pub exports: BTreeSet<String>,
    /// All `syscall` instructions with their numbers, where these can be told.
    pub raw_calls: Vec<Option<u16>>,
    /// Those that concern files and can be replaced.
    pub sites: Vec<Site>,
    /// Its executable segments.
    pub segments: Vec<CodeSegment>,
    /// Its code is changed when it is loaded (`DT_TEXTREL`).
    pub changes_code: bool,
    /// Others that can be replaced: where calls are dispatched, these need not be.
    pub other_sites: Vec<Site>,
    /// Those that concern files and cannot be replaced, by address and number.
    pub unreachable: Vec<(u64, u16)>,
    /// Addresses of those whose number cannot be told.
    pub unknown: Vec<u64>,
}

impl Binary {
    /// Reads and analyses a file.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(|error| Error::Io(path.to_owned(), error))?;
        let mut binary = Self::parse(&bytes).ok_or_else(|| Error::Foreign(path.to_owned()))?;
        binary.path = path.to_owned();
        Ok(binary)
    }

    /// Reads and analyses a file without its symbols, which takes a tenth of the time.
    pub fn read_sites(path: &Path) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(|error| Error::Io(path.to_owned(), error))?;
        let foreign = || Error::Foreign(path.to_owned());
        let file = ElfFile64::<LittleEndian>::parse(&*bytes).map_err(|_| foreign())?;
        Self::parse_sites(&file, &bytes).ok_or_else(foreign)
    }

    /// The kind of a file and the libraries that it needs, without its calls.
    pub fn read_outline(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(|error| Error::Io(path.to_owned(), error))?;
        let data = ReadCache::new(file);
        let foreign = || Error::Foreign(path.to_owned());
        let file = ElfFile64::<LittleEndian, _>::parse(&data).map_err(|_| foreign())?;
        Self::parse_outline(&file, &data).ok_or_else(foreign)
    }

    /// The parts of the analysis that a run needs. Sites that `cache` has are taken from there, and then
    /// [`raw_calls`](Binary::raw_calls) and [`unreachable`](Binary::unreachable) are empty. Otherwise the
    /// file is scanned, and the result is put into the cache.
    pub fn read_for_run(path: &Path, cache: Option<&Cache>) -> Result<Self, Error> {
        let failed = |error| Error::Io(path.to_owned(), error);
        let file = File::open(path).map_err(failed)?;
        let stamp = Stamp::of(&file.metadata().map_err(failed)?);
        // Reads what is looked at: little of the file, unless its code is.
        let data = ReadCache::new(file);
        let foreign = || Error::Foreign(path.to_owned());
        let file = ElfFile64::<LittleEndian, _>::parse(&data).map_err(|_| foreign())?;
        let mut binary = Self::parse_outline(&file, &data).ok_or_else(foreign)?;
        binary.path = path.to_owned();
        match cache.and_then(|cache| cache.sites(&binary.build_id, stamp)) {
            Some(sites) => {
                let is_looked_at = |site: &Site| site.number.is_some_and(is_looked_at);
                (binary.sites, binary.other_sites) = sites.into_iter().partition(is_looked_at);
            }
            None => {
                binary.find_calls(&file);
                if let Some(cache) = cache {
                    cache.keep(&binary.build_id, stamp, &binary.sites(true));
                }
            }
        }
        Ok(binary)
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let file = ElfFile64::<LittleEndian>::parse(bytes).ok()?;
        let mut binary = Self::parse_sites(&file, bytes)?;
        for symbol in file.dynamic_symbols() {
            let Ok(name) = symbol.name() else { continue };
            let set = if symbol.is_undefined() { &mut binary.imports } else { &mut binary.exports };
            set.insert(name.to_owned());
        }
        Some(binary)
    }

    fn parse_sites(file: &ElfFile64<'_, LittleEndian>, bytes: &[u8]) -> Option<Self> {
        let mut binary = Self::parse_outline(file, bytes)?;
        binary.find_calls(file);
        Some(binary)
    }

    /// All but symbols and calls.
    fn parse_outline<'d, R: ReadRef<'d>>(
        file: &ElfFile64<'d, LittleEndian, R>,
        data: R,
    ) -> Option<Self> {
        if file.elf_header().e_machine(LittleEndian) != elf::EM_X86_64 {
            return None;
        }
        let mut binary = Binary {
            build_id: file.build_id().ok().flatten().unwrap_or_default().to_vec(),
            ..Binary::default()
        };
        binary.read_dynamic(file, data);
        Some(binary)
    }

    fn find_calls<'d, R: ReadRef<'d>>(&mut self, file: &ElfFile64<'d, LittleEndian, R>) {
        for found in calls_of(file) {
            self.add(found);
        }
    }

    fn read_dynamic<'d, R: ReadRef<'d>>(&mut self, file: &ElfFile64<'d, LittleEndian, R>, data: R) {
        let header: &FileHeader64<LittleEndian> = file.elf_header();
        let Ok(segments) = header.program_headers(LittleEndian, data) else { return };
        for segment in segments {
            let is_code = segment.p_flags(LittleEndian) & elf::PF_X != 0;
            if is_code && segment.p_type(LittleEndian) == elf::PT_LOAD {
                self.segments.push(CodeSegment {
                    address: segment.p_vaddr(LittleEndian),
                    len: segment.p_filesz(LittleEndian),
                    offset: segment.p_offset(LittleEndian),
                });
            }
            if let Ok(Some(path)) = segment.interpreter(LittleEndian, data) {
                self.interpreter = Some(String::from_utf8_lossy(path).into_owned().into());
            }
        }
        let is_program = header.e_type(LittleEndian) == elf::ET_EXEC;
        let table = file.elf_section_table();
        let dynamic = table.dynamic(LittleEndian, data).ok().flatten();
        let dynamic = dynamic.and_then(|(entries, link)| {
            Some((entries, table.strings(LittleEndian, data, link).ok()?))
        });
        let mut pie = false;
        for (entry, strings) in dynamic
            .iter()
            .flat_map(|(entries, strings)| entries.iter().map(|entry| (entry, *strings)))
        {
            let tag = entry.tag32(LittleEndian).unwrap_or(0);
            let text = || {
                let at = entry.val32(LittleEndian).unwrap_or(u32::MAX);
                let bytes = strings.get(at).unwrap_or_default();
                String::from_utf8_lossy(bytes).into_owned()
            };
            match tag {
                elf::DT_NEEDED => self.needed.push(text()),
                elf::DT_RUNPATH | elf::DT_RPATH => {
                    self.run_path.extend(text().split(':').map(str::to_owned));
                }
                elf::DT_TEXTREL => self.changes_code = true,
                elf::DT_FLAGS if entry.val32(LittleEndian).unwrap_or(0) & elf::DF_TEXTREL != 0 => {
                    self.changes_code = true;
                }
                elf::DT_FLAGS_1 => {
                    pie = entry.val32(LittleEndian).unwrap_or(0) & elf::DF_1_PIE != 0;
                }
                _ => {}
            }
        }
        self.is_static = self.interpreter.is_none() && (is_program || pie);
    }

    fn add(&mut self, found: Found) {
        self.raw_calls.push(found.number);
        if found.number.is_none() {
            self.unknown.push(found.address);
        }
        let Some(number) = found.number else { return };
        match found.site {
            Some(site) if is_looked_at(number) => self.sites.push(site),
            Some(site) if !RETURNS_ELSEWHERE.contains(&number) => self.other_sites.push(site),
            _ if !is_looked_at(number) => {}
            Some(_) => {}
            None => self.unreachable.push((found.address, number)),
        }
    }

    /// The object file at `path`, to look at in another way.
    pub(crate) fn with_file<T>(
        path: &Path,
        look: impl FnOnce(&ElfFile64<'_, LittleEndian>) -> T,
    ) -> Result<T, Error> {
        let bytes = fs::read(path).map_err(|error| Error::Io(path.to_owned(), error))?;
        let file = ElfFile64::<LittleEndian>::parse(&*bytes);
        file.map(|file| look(&file)).map_err(|_| Error::Foreign(path.to_owned()))
    }

    /// The sites to be patched; with `all`, also those that do not concern files.
    pub fn to_sites(&self, all: bool) -> ObjectSites {
        ObjectSites { build_id: self.build_id.clone(), sites: self.sites(all), image: None }
    }

    /// True if there is a site to be patched.
    pub fn has_sites(&self) -> bool {
        !self.sites.is_empty() || !self.other_sites.is_empty()
    }

    /// Its code with all of these sites patched, to be put at `place` of the images of a run; `None`
    /// where it cannot have an image.
    pub fn image(&self, all: bool, place: u64) -> Option<(PatchedImage, Vec<u8>)> {
        if self.changes_code || self.build_id.is_empty() {
            return None;
        }
        image::make(&File::open(&self.path).ok()?, &self.segments, &self.sites(all), place)
    }

    fn sites(&self, all: bool) -> Vec<Site> {
        if !all {
            return self.sites.clone();
        }
        let mut sites = [&self.sites[..], &self.other_sites].concat();
        sites.sort_unstable_by_key(|site| site.address);
        sites
    }

    /// `syscall` instructions that may concern files: those with a number that is looked at, or an
    /// unknown one.
    pub fn file_calls(&self) -> usize {
        let may = |number: &&Option<u16>| number.is_none_or(|number| calls::name(number).is_some());
        self.raw_calls.iter().filter(may).count()
    }
}

/// Programs with more bytes are not scanned while they are executed.
const MOST_SCANNED: u64 = 2 << 20;

fn is_looked_at(number: u16) -> bool {
    calls::name(number).is_some()
}

/// rt_sigreturn(2), fork(2) and vfork(2): they do not come back as others do, and are left to be
/// dispatched.
const RETURNS_ELSEWHERE: [u16; 3] = [15, 57, 58];

/// Where the loader would find a library, ld.so(8): `run_path` first, then the usual directories.
pub fn find_library(name: &str, run_path: &[String]) -> Option<PathBuf> {
    const USUAL: [&str; 6] = [
        "/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu",
        "/lib64",
        "/usr/lib64",
        "/usr/local/lib",
        "/usr/lib",
    ];
    let own = run_path.iter().map(String::as_str).filter(|folder| folder.starts_with('/'));
    let places = own.chain(USUAL).map(|folder| Path::new(folder).join(name));
    places.filter_map(|place| fs::canonicalize(place).ok()).find(|place| place.is_file())
}

/// True if the program in `file` makes system calls on files without the C library: it is a Go
/// program, or one of its functions has such a `syscall` instruction, or one whose number cannot be
/// told. Instructions that the run replaces, because they are `planned`, do not count. Instructions of
/// programs with more than 2 MiB are not looked for: that takes milliseconds for each MiB.
pub fn has_own_file_calls(file: &File, planned: &[ObjectSites]) -> bool {
    let data = ReadCache::new(file);
    let Ok(file) = ElfFile64::<LittleEndian, _>::parse(&data) else { return false };
    let build_id = file.build_id().ok().flatten().unwrap_or_default();
    let is_it = |object: &&ObjectSites| !build_id.is_empty() && object.build_id == build_id;
    let planned = planned.iter().find(is_it);
    // The functions of such a program have no unwind tables.
    if planned.is_none() && file.section_by_name(".note.go.buildid").is_some() {
        return true;
    }
    if file.data().len().is_ok_and(|len| len > MOST_SCANNED) {
        return false;
    }
    let is_replaced = |found: &Found| {
        let sites = planned.iter().flat_map(|object| &object.sites);
        found.site.is_some_and(|own| sites.into_iter().any(|site| site.address == own.address))
    };
    calls_of(&file)
        .iter()
        .any(|found| found.is_code && found.number.is_none_or(is_looked_at) && !is_replaced(found))
}

/// All `syscall` instructions, function by function as the unwind tables delimit them. Bytes between
/// functions that look like the instruction are calls without a number.
fn calls_of<'d, R: ReadRef<'d>>(file: &ElfFile64<'d, LittleEndian, R>) -> Vec<Found> {
    // The tables are read if there is anything to look up.
    let known = OnceCell::new();
    let mut found = Vec::new();
    let mut decoded_to = 0;
    for section in file.sections() {
        let object::SectionFlags::Elf { sh_flags } = section.flags() else { continue };
        if sh_flags & u64::from(elf::SHF_EXECINSTR) == 0 {
            continue;
        }
        let Ok(code) = section.data() else { continue };
        let start = section.address();
        for at in code.windows(2).enumerate().filter(|(_, w)| *w == [0x0f, 0x05]).map(|(at, _)| at)
        {
            let address = start + at as u64;
            if address < decoded_to {
                continue;
            }
            let functions = known.get_or_init(|| functions(file));
            let place = functions.partition_point(|&(from, _)| from <= address);
            let range = place.checked_sub(1).map(|place| functions[place]);
            let range = range.filter(|&(from, end)| from >= start && address < end);
            match range {
                Some((from, end)) => {
                    let end = usize::try_from(end - start).unwrap_or(code.len()).min(code.len());
                    let part = &code[(from - start) as usize..end];
                    found.extend(scan::function(part, from));
                    decoded_to = from + part.len() as u64;
                }
                None => found.push(Found::between_functions(address)),
            }
        }
    }
    found
}

/// First and last address (exclusive) of every function, in their order, from `.eh_frame`.
pub(crate) fn functions<'d, R: ReadRef<'d>>(
    file: &ElfFile64<'d, LittleEndian, R>,
) -> Vec<(u64, u64)> {
    let Some(section) = file.section_by_name(".eh_frame") else { return Vec::new() };
    let Ok(bytes) = section.data() else { return Vec::new() };
    let mut all = crate::unwind::ranges(bytes, section.address());
    all.sort_unstable();
    // What is written in assembly ends its description before the call (clone(2) does, because the
    // stack changes there): a function goes on to the next one.
    let starts: Vec<u64> = all.iter().skip(1).map(|&(from, _)| from).collect();
    for ((_, end), next) in all.iter_mut().zip(starts) {
        *end = (*end).max(next);
    }
    all
}
