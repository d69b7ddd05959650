//! The system calls that a function of a library leads to, and the function that an address belongs
//! to.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use iced_x86::{Decoder, DecoderOptions, OpKind};
use object::read::elf::ElfFile64;
use object::{LittleEndian, Object, ObjectSection, ObjectSymbol, SymbolKind};

use crate::analysis::{AnalysisError, ObjectFile, functions};
use crate::scan;

/// The functions that an object file exports.
#[derive(Clone, Debug, Default)]
pub struct ExportedFunctions {
    /// First address, address after the last, and name.
    all: Vec<(u64, u64, String)>,
}

impl ExportedFunctions {
    /// Returns the exported functions of a file.
    ///
    /// # Errors
    ///
    /// Where the file cannot be read or is no ELF file.
    pub fn read_file(path: &Path) -> Result<Self, AnalysisError> {
        ObjectFile::with_file(path, Self::read_elf)
    }

    fn read_elf(file: &ElfFile64<'_, LittleEndian>) -> Self {
        let mut all = Vec::new();
        for symbol in file.dynamic_symbols() {
            let is_function = symbol.kind() == SymbolKind::Text && symbol.size() > 0;
            if let (true, Ok(name)) = (is_function && symbol.is_definition(), symbol.name()) {
                let end = symbol.address() + symbol.size();
                all.push((symbol.address(), end, name.to_owned()));
            }
        }
        ExportedFunctions { all }
    }

    /// The function that `address` lies in, by its best known name: of several names, the name with
    /// fewest underscores at its beginning, and then the shortest.
    pub fn name(&self, address: u64) -> Option<&str> {
        let within = self.all.iter().filter(|(from, end, _)| (*from..*end).contains(&address));
        let names = within.map(|(_, _, name)| name.as_str());
        names.min_by_key(|name| {
            (name.len() - name.trim_start_matches('_').len(), name.len(), name.to_string())
        })
    }
}

/// The calls of one function itself.
#[derive(Default)]
struct FunctionCalls {
    /// Functions that it calls or jumps to, by place.
    next: Vec<usize>,
    /// The numbers of its system calls, where the code shows these.
    calls: Vec<Option<u16>>,
}

/// For every function that a library exports, the numbers of the system calls that it comes to by
/// direct calls and jumps; `None` among them stands for a number that the code does not show. Calls
/// through a pointer (as in the functions of a stream of stdio) are not seen.
///
/// # Errors
///
/// Where the file cannot be read or is no ELF file.
pub fn reach(path: &Path) -> Result<BTreeMap<String, BTreeSet<Option<u16>>>, AnalysisError> {
    ObjectFile::with_file(path, |file| {
        let ranges = functions(file);
        let all = find_all(file, &ranges);
        let place = |address: u64| find_containing(&ranges, address);
        let exports = ExportedFunctions::read_elf(file).all.into_iter();
        let reached =
            |(from, _, name): (u64, u64, String)| Some((name, from_here(&all, place(from)?)));
        exports.filter_map(reached).collect()
    })
}

fn find_containing(ranges: &[(u64, u64)], address: u64) -> Option<usize> {
    let at = ranges.partition_point(|&(from, _)| from <= address).checked_sub(1)?;
    (address < ranges[at].1).then_some(at)
}

fn find_all(file: &ElfFile64<'_, LittleEndian>, ranges: &[(u64, u64)]) -> Vec<FunctionCalls> {
    let sections: Vec<(u64, &[u8])> = file
        .sections()
        .filter_map(|section| Some((section.address(), section.data().ok()?)))
        .collect();
    let code = |from: u64, end: u64| {
        sections.iter().find_map(|&(start, bytes)| {
            let at = usize::try_from(from.checked_sub(start)?).ok()?;
            bytes.get(at..at.checked_add(usize::try_from(end - from).ok()?)?)
        })
    };
    let function = |&(from, end): &(u64, u64)| {
        let Some(code) = code(from, end) else { return FunctionCalls::default() };
        let leaves = |target: &u64| !(from..end).contains(target);
        let next = Decoder::with_ip(64, code, from, DecoderOptions::NONE)
            .into_iter()
            .filter(|one| one.op0_kind() == OpKind::NearBranch64)
            .map(|one| one.near_branch_target())
            .filter(leaves)
            .filter_map(|target| find_containing(ranges, target));
        let next = BTreeSet::from_iter(next).into_iter().collect();
        let calls = scan::function(code, from, end).iter().map(|found| found.number).collect();
        FunctionCalls { next, calls }
    };
    ranges.iter().map(function).collect()
}

fn from_here(all: &[FunctionCalls], start: usize) -> BTreeSet<Option<u16>> {
    let (mut seen, mut next, mut calls) = (BTreeSet::from([start]), vec![start], BTreeSet::new());
    while let Some(at) = next.pop() {
        calls.extend(&all[at].calls);
        next.extend(all[at].next.iter().filter(|at| seen.insert(**at)));
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_the_c_library_come_to_their_calls() {
        let libc = Path::new("/lib/x86_64-linux-gnu/libc.so.6");
        let Ok(reach) = reach(libc) else {
            println!("not here: the C library is elsewhere");
            return;
        };
        assert!(reach["open"].contains(&Some(257)));
        // By several functions between.
        assert!(reach["fopen"].contains(&Some(257)), "{:?}", reach["fopen"]);
        assert!(reach["opendir"].contains(&Some(257)));
        assert!(!reach["getenv"].contains(&Some(257)));
        // Its number is an argument.
        assert!(reach["syscall"].contains(&None));
    }

    #[test]
    fn an_address_has_the_name_that_people_know() {
        let function = |from, end, name: &str| (from, end, name.to_owned());
        let all = vec![
            function(10, 20, "__open64"),
            function(10, 20, "open64"),
            function(10, 20, "open"),
            function(10, 20, "_open"),
            function(30, 40, "_IO_read"),
        ];
        let exports = ExportedFunctions { all };
        assert_eq!((exports.name(10), exports.name(19)), (Some("open"), Some("open")));
        assert_eq!((exports.name(20), exports.name(35)), (None, Some("_IO_read")));
    }
}
