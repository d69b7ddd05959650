//! The code that replaces a `syscall` instruction: a jump, and what it leads to.

use crate::plan::PatchSite;

/// Room for one trampoline: two parts of a site, and 37 bytes of our own.
pub const TRAMPOLINE: usize = 64;

/// How far behind the call of the entry the `syscall` of a trampoline ends.
pub const TO_SYSCALL_END: u64 = 8 + 2 + 2;

/// The displacement from `from` to `to`; both lie within 2 GiB of each other.
fn distance(from: u64, to: u64) -> [u8; 4] {
    (to.wrapping_sub(from) as i64 as i32).to_le_bytes()
}

/// The code that replaces a site at `at`: a jump to `to`, and no operation for the rest of the 15 bytes
/// that a site may have.
pub fn jump(at: u64, to: u64) -> [u8; 15] {
    let mut bytes = [0x90; 15];
    bytes[0] = 0xe9;
    bytes[1..5].copy_from_slice(&distance(at.wrapping_add(5), to));
    bytes
}

/// The trampoline at `at` for `site`, which lies at `original`: the instructions before the
/// `syscall`, a step over the red zone, the call of the entry, whose address is in memory at `head`,
/// the `syscall` itself where the call is not ours, the instructions after it, and the jump back.
pub fn code(site: &PatchSite, original: u64, at: u64, head: u64) -> Vec<u8> {
    let (before, rest) = site.bytes[..usize::from(site.len)].split_at(usize::from(site.syscall_at));
    let after = &rest[2..];
    let mut code = Vec::with_capacity(TRAMPOLINE);
    code.extend_from_slice(before);
    code.extend_from_slice(&[0x48, 0x8d, 0x64, 0x24, 0x80]); // lea rsp, [rsp - 128]
    code.extend_from_slice(&[0xff, 0x15]); // call [rip + head]
    let next = at.wrapping_add(code.len() as u64 + 4);
    code.extend_from_slice(&distance(next, head));
    code.extend_from_slice(&[0x48, 0x8d, 0xa4, 0x24, 0x80, 0, 0, 0]); // lea rsp, [rsp + 128]
    code.extend_from_slice(&[0x73, 2, 0x0f, 0x05]); // jnc +2; syscall
    code.extend_from_slice(after);
    code.push(0xe9);
    let next = at.wrapping_add(code.len() as u64 + 4);
    code.extend_from_slice(&distance(next, original.wrapping_add(u64::from(site.len))));
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trampoline_keeps_what_stood_around_the_call() {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&[0x0f, 0x05, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff]);
        let site = PatchSite { address: 0, len: 8, syscall_at: 0, number: Some(0), bytes };
        let code = code(&site, 0x1000, 0x2010, 0x2000);
        assert!(code.len() <= TRAMPOLINE);
        assert_eq!(code[23..29], bytes[2..8]);
        let back = i32::from_le_bytes(code[30..34].try_into().unwrap());
        assert_eq!(0x2010 + 34 + i64::from(back), 0x1008);
    }
}
