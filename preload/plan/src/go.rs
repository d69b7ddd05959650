//! The functions of a Go program, by its table of functions (`.gopclntab`), and the sites of system
//! calls in them.

use object::read::elf::ElfFile64;
use object::{LittleEndian, Object, ObjectSection};

use crate::plan::PatchSite;
use crate::scan;

/// The first bytes of the table since Go 1.18, and since Go 1.20.
const MAGICS: [u32; 2] = [0xffff_fff0, 0xffff_fff1];
/// Offsets in the header: number of functions, first address of the code, offset of the list of
/// functions.
const COUNT: usize = 8;
const TEXT_START: usize = 24;
const LIST: usize = 64;
/// No program has more functions.
const MOST_FUNCTIONS: usize = 4 << 20;

/// The sites in the functions of the Go program with these bytes, in their order; none of other
/// programs. The sites of rt_sigreturn(2), fork(2) and vfork(2) are left out.
pub fn sites(bytes: &[u8]) -> Vec<PatchSite> {
    let Ok(file) = ElfFile64::<LittleEndian>::parse(bytes) else { return Vec::new() };
    let is_go = file.section_by_name(".note.go.buildid").is_some();
    let text = file.section_by_name(".text").filter(|_| is_go);
    let table = [".gopclntab", ".data.rel.ro.gopclntab"];
    let table = table.iter().find_map(|name| file.section_by_name(name));
    let (Some(text), Some(table)) = (text, table) else { return Vec::new() };
    let (Ok(code), Ok(table)) = (text.data(), table.data()) else { return Vec::new() };
    let starts = function_starts(table, text.address());
    let mut sites = Vec::new();
    let mut decoded_to = 0;
    for at in memchr::memmem::find_iter(code, &scan::SYSCALL) {
        let address = text.address() + at as u64;
        let place = starts.partition_point(|start| *start <= address);
        if address < decoded_to || place == 0 {
            continue;
        }
        let from = starts[place - 1].max(text.address());
        let end = starts.get(place).copied().unwrap_or(u64::MAX);
        let end = end.min(text.address() + code.len() as u64);
        if let Some(function) =
            code.get((from - text.address()) as usize..(end - text.address()) as usize)
        {
            let found = scan::function(function, from, end).into_iter();
            sites.extend(found.filter(|found| found.is_code).filter_map(|found| found.site));
        }
        decoded_to = end;
    }
    sites.retain(|site| {
        site.number.is_none_or(|number| !crate::analysis::RETURNS_ELSEWHERE.contains(&number))
    });
    sites
}

/// The first addresses of all functions; none if the table is of an unknown version.
fn function_starts(table: &[u8], text: u64) -> Vec<u64> {
    let word =
        |at: usize| Some(u32::from_le_bytes(table.get(at..at.checked_add(4)?)?.try_into().ok()?));
    let long =
        |at: usize| Some(u64::from_le_bytes(table.get(at..at.checked_add(8)?)?.try_into().ok()?));
    let read = || {
        let is_known = word(0).is_some_and(|magic| MAGICS.contains(&magic));
        if !is_known || table.get(7) != Some(&8) {
            return None;
        }
        let count = usize::try_from(long(COUNT)?).ok().filter(|count| *count <= MOST_FUNCTIONS)?;
        // A program that can be loaded anywhere has no address here.
        let text = long(TEXT_START).filter(|start| *start != 0).unwrap_or(text);
        let list = usize::try_from(long(LIST)?).ok()?;
        let start = |at: usize| text.checked_add(word(list.checked_add(at * 8)?)?.into());
        (0..count).map(start).collect::<Option<Vec<u64>>>()
    };
    let mut starts = read().unwrap_or_default();
    starts.sort_unstable();
    starts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(magic: u32, functions: &[u32]) -> Vec<u8> {
        let mut table = magic.to_le_bytes().to_vec();
        table.extend([0, 0, 1, 8]);
        for word in [functions.len() as u64, 0, 0x1000, 0, 0, 0, 0, 72] {
            table.extend(word.to_le_bytes());
        }
        for function in functions {
            table.extend(function.to_le_bytes());
            table.extend(0u32.to_le_bytes());
        }
        table
    }

    #[test]
    fn functions_are_those_of_the_table() {
        let good = table(MAGICS[1], &[0, 0x40, 0x80]);
        assert_eq!(function_starts(&good, 0), [0x1000, 0x1040, 0x1080]);
        for len in 0..good.len() - 4 {
            assert!(function_starts(&good[..len], 0).is_empty(), "{len} bytes");
        }
        assert!(function_starts(&table(0xffff_fffb, &[0]), 0).is_empty());
        let mut none = good;
        none[TEXT_START..TEXT_START + 8].fill(0);
        assert_eq!(function_starts(&none, 0x2000), [0x2000, 0x2040, 0x2080]);
        none[COUNT..COUNT + 8].fill(0xff);
        assert!(function_starts(&none, 0x2000).is_empty());
    }

    #[test]
    fn other_programs_have_no_sites_here() {
        let bytes = std::fs::read("/proc/self/exe").unwrap();
        assert!(sites(&bytes).is_empty() && sites(b"").is_empty());
    }
}
