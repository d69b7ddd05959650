//! The analysis of a program or library by its file: build id, sites of system calls, imports.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use object::elf::{self, FileHeader64};
use object::read::elf::{Dyn, ElfFile64, ElfSymbol64, FileHeader, ProgramHeader};
use object::read::{ReadCache, ReadRef};
use object::{LittleEndian, Object, ObjectSection, ObjectSymbol, SymbolKind};

use crate::cache::{AnalysisCache, FileStamp};
use crate::calls;
use crate::image::{self, CodeSegment, PatchedImage};
use crate::plan::{ObjectSites, PatchSite};
use crate::scan::{self, SyscallInstruction};

/// Why a file was not understood.
#[derive(Debug)]
pub enum AnalysisError {
    /// It could not be read.
    Io(PathBuf, std::io::Error),
    /// It is no ELF file for x86-64.
    Foreign(PathBuf),
}

impl fmt::Display for AnalysisError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AnalysisError::Io(path, error) => write!(f, "{}: {error}", path.display()),
            AnalysisError::Foreign(path) => {
                write!(
                    f,
                    "{}: not a 64-bit x86-64 ELF file: only those are analysed",
                    path.display()
                )
            }
        }
    }
}

impl std::error::Error for AnalysisError {}

/// An object file.
#[derive(Clone, Debug, Default)]
pub struct ObjectFile {
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
    /// All `syscall` instructions with their numbers, where the code shows these.
    pub raw_calls: Vec<Option<u16>>,
    /// The sites that concern files and can be replaced.
    pub sites: Vec<PatchSite>,
    /// Its executable segments.
    pub segments: Vec<CodeSegment>,
    /// Its code is changed when it is loaded (`DT_TEXTREL`).
    pub changes_code: bool,
    /// Others that can be replaced: where calls are dispatched, these need not be.
    pub other_sites: Vec<PatchSite>,
    /// The sites that concern files and cannot be replaced, by address and number.
    pub unreachable: Vec<(u64, u16)>,
    /// Addresses of the sites whose number the code does not show.
    pub unknown: Vec<u64>,
    /// The sites in functions whose number is known only when they are executed, and that can be
    /// replaced. In the C library since glibc 2.41, one of them makes all calls in which a thread
    /// can be cancelled.
    pub variable_sites: Vec<PatchSite>,
    /// How many instructions may concern files and cannot be replaced.
    pub left: usize,
}

impl ObjectFile {
    /// Reads and analyses a file.
    pub fn read(path: &Path) -> Result<Self, AnalysisError> {
        let bytes = fs::read(path).map_err(|error| AnalysisError::Io(path.to_owned(), error))?;
        let mut binary =
            Self::parse(&bytes).ok_or_else(|| AnalysisError::Foreign(path.to_owned()))?;
        binary.path = path.to_owned();
        Ok(binary)
    }

    /// Reads and analyses a file without its symbols, which takes a tenth of the time.
    pub fn read_sites(path: &Path) -> Result<Self, AnalysisError> {
        let bytes = fs::read(path).map_err(|error| AnalysisError::Io(path.to_owned(), error))?;
        let foreign = || AnalysisError::Foreign(path.to_owned());
        let file = ElfFile64::<LittleEndian>::parse(&*bytes).map_err(|_| foreign())?;
        let mut binary = Self::parse_sites(&file, &bytes).ok_or_else(foreign)?;
        binary.path = path.to_owned();
        Ok(binary)
    }

    /// The kind of a file and the libraries that it needs, without its calls.
    pub fn read_outline(path: &Path) -> Result<Self, AnalysisError> {
        let file = File::open(path).map_err(|error| AnalysisError::Io(path.to_owned(), error))?;
        let data = ReadCache::new(file);
        let foreign = || AnalysisError::Foreign(path.to_owned());
        let file = ElfFile64::<LittleEndian, _>::parse(&data).map_err(|_| foreign())?;
        Self::parse_outline(&file, &data).ok_or_else(foreign)
    }

    /// The parts of the analysis that a run needs. Sites that `cache` has are taken from there, and
    /// then [`raw_calls`](ObjectFile::raw_calls) and [`unreachable`](ObjectFile::unreachable) are
    /// empty. Otherwise the file is scanned, and the result is put into the cache.
    pub fn read_for_run(path: &Path, cache: Option<&AnalysisCache>) -> Result<Self, AnalysisError> {
        let failed = |error| AnalysisError::Io(path.to_owned(), error);
        let file = File::open(path).map_err(failed)?;
        let stamp = FileStamp::from_metadata(&file.metadata().map_err(failed)?);
        // Reads what is looked at: little of the file, unless its code is.
        let data = ReadCache::new(file);
        let foreign = || AnalysisError::Foreign(path.to_owned());
        let file = ElfFile64::<LittleEndian, _>::parse(&data).map_err(|_| foreign())?;
        let mut binary = Self::parse_outline(&file, &data).ok_or_else(foreign)?;
        binary.path = path.to_owned();
        binary.find_calls_once(&file, stamp, cache);
        Ok(binary)
    }

    /// Returns the result of [`read_for_run`](Self::read_for_run), of a file with this name and
    /// stamp that is in memory. `None` if it is no ELF file for x86-64.
    pub fn read_bytes(
        path: &Path,
        bytes: &[u8],
        stamp: FileStamp,
        cache: Option<&AnalysisCache>,
    ) -> Option<Self> {
        let file = ElfFile64::<LittleEndian>::parse(bytes).ok()?;
        let mut binary = Self::parse_outline(&file, bytes)?;
        binary.path = path.to_owned();
        binary.find_calls_once(&file, stamp, cache);
        Some(binary)
    }

    fn find_calls_once<'d, R: ReadRef<'d>>(
        &mut self,
        file: &ElfFile64<'d, LittleEndian, R>,
        stamp: FileStamp,
        cache: Option<&AnalysisCache>,
    ) {
        if let Some(sites) = cache.and_then(|cache| cache.sites(&self.build_id, stamp)) {
            for site in sites {
                let sites = match site.number {
                    None => &mut self.variable_sites,
                    Some(number) if is_looked_at(number) => &mut self.sites,
                    Some(_) => &mut self.other_sites,
                };
                sites.push(site);
            }
            return;
        }
        self.find_calls(file);
        // An object with unreplaced instructions is not cached, but analysed again, so that the
        // warning is repeated.
        if let Some(cache) = cache.filter(|_| self.left == 0) {
            cache.keep(&self.build_id, stamp, &self.list_sites());
        }
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
        let mut binary = ObjectFile {
            build_id: file.build_id().ok().flatten().unwrap_or_default().to_vec(),
            ..ObjectFile::default()
        };
        binary.read_dynamic(file, data);
        Some(binary)
    }

    fn find_calls<'d, R: ReadRef<'d>>(&mut self, file: &ElfFile64<'d, LittleEndian, R>) {
        for found in calls_of(file) {
            self.add(found);
        }
        // Functions of a Go program have no unwind tables.
        self.left += usize::from(file.section_by_name(".note.go.buildid").is_some());
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

    fn add(&mut self, found: SyscallInstruction) {
        self.raw_calls.push(found.number);
        let is_left = found.site.is_none() && found.is_code;
        let Some(number) = found.number else {
            self.unknown.push(found.address);
            self.variable_sites.extend(found.site.filter(|_| found.is_code));
            self.left += usize::from(is_left);
            return;
        };
        match found.site {
            Some(site) if is_looked_at(number) => self.sites.push(site),
            Some(site) if !RETURNS_ELSEWHERE.contains(&number) => self.other_sites.push(site),
            _ if !is_looked_at(number) => {}
            Some(_) => {}
            None => {
                self.unreachable.push((found.address, number));
                self.left += usize::from(is_left);
            }
        }
    }

    /// The object file at `path`, to look at in another way.
    pub(crate) fn with_file<T>(
        path: &Path,
        look: impl FnOnce(&ElfFile64<'_, LittleEndian>) -> T,
    ) -> Result<T, AnalysisError> {
        let bytes = fs::read(path).map_err(|error| AnalysisError::Io(path.to_owned(), error))?;
        let file = ElfFile64::<LittleEndian>::parse(&*bytes);
        file.map(|file| look(&file)).map_err(|_| AnalysisError::Foreign(path.to_owned()))
    }

    /// The sites to be patched; with `all`, also those that do not concern files.
    pub fn to_sites(&self, all: bool) -> ObjectSites {
        ObjectSites { build_id: self.build_id.clone(), sites: self.sites(all), image: None }
    }

    /// Its code with all of these sites patched, to be put at `place` of the images of a run;
    /// `None` where it cannot have an image.
    pub fn image(&self, all: bool, place: u64) -> Option<(PatchedImage, Vec<u8>)> {
        if self.changes_code || self.build_id.is_empty() {
            return None;
        }
        image::make(&File::open(&self.path).ok()?, &self.segments, &self.sites(all), place)
    }

    fn sites(&self, all: bool) -> Vec<PatchSite> {
        let other = if all { &self.other_sites[..] } else { &[] };
        sort_sites(&[&self.sites, other, &self.variable_sites])
    }

    /// How many instructions are replaced in a run.
    pub fn count_replaced(&self) -> usize {
        self.sites(false).len()
    }

    /// All that could be replaced.
    fn list_sites(&self) -> Vec<PatchSite> {
        sort_sites(&[&self.sites, &self.other_sites, &self.variable_sites])
    }

    /// `syscall` instructions that may concern files: those with a number that is looked at, or an
    /// unknown one.
    pub fn file_calls(&self) -> usize {
        let may = |number: &&Option<u16>| number.is_none_or(|number| calls::name(number).is_some());
        self.raw_calls.iter().filter(may).count()
    }
}

/// Sites in the order of their addresses.
fn sort_sites(parts: &[&[PatchSite]]) -> Vec<PatchSite> {
    let mut sites = parts.concat();
    sites.sort_unstable_by_key(|site| site.address);
    sites
}

/// True if the file exports this symbol.
///
/// # Errors
///
/// Where the file cannot be read or is no ELF file for x86-64.
pub fn exports(path: &Path, name: &str) -> Result<bool, AnalysisError> {
    let file = File::open(path).map_err(|error| AnalysisError::Io(path.to_owned(), error))?;
    let data = ReadCache::new(file);
    let file = ElfFile64::<LittleEndian, _>::parse(&data);
    let file = file.map_err(|_| AnalysisError::Foreign(path.to_owned()))?;
    let is_it = |symbol: &ElfSymbol64<'_, '_, LittleEndian, _>| {
        symbol.is_definition() && symbol.name_bytes() == Ok(name.as_bytes())
    };
    Ok(file.elf_header().e_machine(LittleEndian) == elf::EM_X86_64
        && file.dynamic_symbols().any(|symbol| is_it(&symbol)))
}

fn is_looked_at(number: u16) -> bool {
    calls::name(number).is_some()
}

/// rt_sigreturn(2), fork(2) and vfork(2): they do not come back as others do, and are left to be
/// dispatched.
pub(crate) const RETURNS_ELSEWHERE: [u16; 3] = [15, 57, 58];

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

/// All `syscall` and `int 0x80` instructions, function by function as the unwind tables delimit
/// them, or else as symbols do. Other bytes that look like the instruction are calls without a
/// number, unless the number is loaded right before.
fn calls_of<'d, R: ReadRef<'d>>(file: &ElfFile64<'d, LittleEndian, R>) -> Vec<SyscallInstruction> {
    // The tables are read if there is anything to look up.
    let (known, named) = (OnceCell::new(), OnceCell::new());
    let mut found = Vec::new();
    let mut decoded_to = 0;
    for section in file.sections() {
        let object::SectionFlags::Elf { sh_flags } = section.flags() else { continue };
        if sh_flags & u64::from(elf::SHF_EXECINSTR) == 0 {
            continue;
        }
        let Ok(code) = section.data() else { continue };
        let start = section.address();
        let mut places: Vec<usize> = memchr::memmem::find_iter(code, &scan::SYSCALL).collect();
        places.extend(memchr::memmem::find_iter(code, &scan::SYSCALL_32));
        places.sort_unstable();
        for at in places {
            let address = start + at as u64;
            if address < decoded_to {
                continue;
            }
            let within = |ranges: &[FunctionRange]| {
                let place = ranges.partition_point(|function| function.from <= address);
                let range = place.checked_sub(1).map(|place| ranges[place]);
                range.filter(|range| range.from >= start && address < range.end)
            };
            let range = within(known.get_or_init(|| collect_functions(file)));
            match range.or_else(|| within(named.get_or_init(|| symbols(file)))) {
                Some(FunctionRange { from, own_end, end }) => {
                    let end = usize::try_from(end - start).unwrap_or(code.len()).min(code.len());
                    let part = &code[(from - start) as usize..end];
                    found.extend(scan::function(part, from, own_end));
                    decoded_to = from + part.len() as u64;
                }
                None if code[at..].starts_with(&scan::SYSCALL) => {
                    found.push(scan::find_between_functions(code, at, address));
                }
                // Two bytes that mean nothing here.
                None => {}
            }
        }
    }
    found
}

/// The addresses of a function.
#[derive(Clone, Copy)]
struct FunctionRange {
    from: u64,
    /// Behind the part that its description names.
    own_end: u64,
    /// Behind the last byte that may belong to it.
    end: u64,
}

/// Functions by symbols, in their order; none of a Go program, whose stacks have no room for the
/// jump.
fn symbols<'d, R: ReadRef<'d>>(file: &ElfFile64<'d, LittleEndian, R>) -> Vec<FunctionRange> {
    if file.section_by_name(".note.go.buildid").is_some() {
        return Vec::new();
    }
    let all = file.symbols().chain(file.dynamic_symbols());
    let functions = all.filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.size() > 0);
    let range = |symbol: ElfSymbol64<'d, '_, LittleEndian, R>| {
        let (from, size) = (symbol.address(), symbol.size());
        let end = from.checked_add(size)?;
        Some(FunctionRange { from, own_end: end, end })
    };
    let mut all: Vec<FunctionRange> = functions.filter_map(range).collect();
    all.sort_unstable_by_key(|function| (function.from, function.end));
    all
}

/// First and last address (exclusive) of every function, in their order, from `.eh_frame`.
pub(crate) fn functions<'d, R: ReadRef<'d>>(
    file: &ElfFile64<'d, LittleEndian, R>,
) -> Vec<(u64, u64)> {
    collect_functions(file).into_iter().map(|function| (function.from, function.end)).collect()
}

/// Functions by their unwind tables, in their order.
fn collect_functions<'d, R: ReadRef<'d>>(
    file: &ElfFile64<'d, LittleEndian, R>,
) -> Vec<FunctionRange> {
    let Some(section) = file.section_by_name(".eh_frame") else { return Vec::new() };
    let Ok(bytes) = section.data() else { return Vec::new() };
    let mut all = crate::unwind::ranges(bytes, section.address());
    all.sort_unstable();
    // A function in assembly ends its description before the call (clone(2) does, because the stack
    // changes there): a function goes on to the next one.
    let starts = all.iter().skip(1).map(|&(from, _)| from).chain([0]);
    let function = |(&(from, own_end), next): (&(u64, u64), u64)| FunctionRange {
        from,
        own_end,
        end: own_end.max(next),
    };
    all.iter().zip(starts).map(function).collect()
}
