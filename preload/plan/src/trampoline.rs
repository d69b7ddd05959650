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

/// The length of a jump in bytes.
const JUMP: usize = 5;
/// The bytes of `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// `lea rsp, [rsp - 128]`, over the red zone, and the beginning of `call [rip + displacement]`.
const ENTER: [u8; 7] = [0x48, 0x8d, 0x64, 0x24, RED_ZONE.wrapping_neg() as u8, 0xff, 0x15];
/// The length of the first instruction of [`ENTER`].
const STEP: usize = 5;
/// `lea rsp, [rsp + 128]`.
const STEP_BACK: [u8; 8] = [0x48, 0x8d, 0xa4, 0x24, RED_ZONE as u8, 0, 0, 0];
/// `jc` over the next jump, and an instruction of two bytes without effect.
const TO_KEPT: [u8; 4] = [0x72, JUMP as u8 + 2, 0x66, 0x90];
/// How far below the stack pointer a function may have data.
const RED_ZONE: u64 = 128;

/// True if the `syscall` of a site stays where it is, behind the jump, and executes the calls that
/// are the kernel's.
///
/// It does if the number is not constant and the instruction is the last one of the site. The C
/// library cancels a thread in a call that waits (pthread_cancel(3)) only if the thread is at the
/// instruction that its own code has (since glibc 2.41), and that instruction has a variable
/// number.
pub fn keeps_instruction(site: &PatchSite) -> bool {
    let at = usize::from(site.syscall_at);
    site.number.is_none() && at >= JUMP && at + SYSCALL.len() == usize::from(site.len)
}

/// The code that replaces `site`, which lies at `at`: a jump to `to`, and no operation for the rest
/// of its bytes but for a `syscall` that stays.
pub fn replacement(site: &PatchSite, at: u64, to: u64) -> Vec<u8> {
    let mut bytes = vec![0x90; usize::from(site.len)];
    bytes[0] = 0xe9;
    bytes[1..JUMP].copy_from_slice(&distance(at.wrapping_add(JUMP as u64), to));
    if keeps_instruction(site) {
        bytes[usize::from(site.syscall_at)..].copy_from_slice(&SYSCALL);
    }
    bytes
}

/// The trampoline at `at` for `site`, which lies at `original`: the instructions before the
/// `syscall`, a step over the red zone, the call of the entry, whose address is in memory at
/// `head`, the `syscall` itself where the call is not ours, the instructions after it, and the jump
/// back. If the `syscall` stays where it is, a jump leads to it instead.
///
/// The instructions of the site are executed at the depth of the stack that they had.
pub fn code(site: &PatchSite, original: u64, at: u64, head: u64) -> Vec<u8> {
    let (before, rest) = site.bytes[..usize::from(site.len)].split_at(usize::from(site.syscall_at));
    let after = &rest[2..];
    let mut code = Vec::with_capacity(TRAMPOLINE);
    code.extend_from_slice(before);
    code.extend_from_slice(&ENTER); // lea rsp, [rsp - 128]; call [rip + head]
    let next = at.wrapping_add(code.len() as u64 + 4);
    code.extend_from_slice(&distance(next, head));
    code.extend_from_slice(&STEP_BACK);
    let end = original.wrapping_add(u64::from(site.len));
    if keeps_instruction(site) {
        // A thread that begins behind the call continues after the two instructions, as in the
        // other form.
        code.extend_from_slice(&TO_KEPT);
        add_jump(&mut code, at, end);
        add_jump(&mut code, at, original.wrapping_add(u64::from(site.syscall_at)));
    } else {
        code.extend_from_slice(&[0x73, 2, 0x0f, 0x05]); // jnc +2; syscall
        code.extend_from_slice(after);
        add_jump(&mut code, at, end);
    }
    code
}

/// Adds a jump to `to` to the code at `at`.
fn add_jump(code: &mut Vec<u8>, at: u64, to: u64) {
    code.push(0xe9);
    let next = at.wrapping_add(code.len() as u64 + 4);
    code.extend_from_slice(&distance(next, to));
}

/// How many bytes behind the call of the entry say where a `syscall` is that stays.
pub const BEHIND_ENTRY: usize = TO_SYSCALL_END as usize + JUMP;

/// A point of the program: an instruction, and the stack pointer there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramPoint {
    /// The address of the instruction.
    pub ip: u64,
    /// The stack pointer.
    pub sp: u64,
}

/// The `syscall` that a trampoline passes its calls to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptCall {
    /// Its end.
    end: u64,
}

impl KeptCall {
    /// The call of the trampoline with `code` behind the call of the entry, which returns to `at`.
    /// `None` if the trampoline has the instruction itself.
    pub fn find(code: &[u8; BEHIND_ENTRY], at: u64) -> Option<Self> {
        let jump = code.strip_prefix(&STEP_BACK)?.strip_prefix(&TO_KEPT)?.strip_prefix(&[0xe9])?;
        let by = i32::from_le_bytes(jump.try_into().ok()?);
        Some(KeptCall { end: at.wrapping_add(BEHIND_ENTRY as u64).wrapping_add_signed(by.into()) })
    }

    /// The point of a thread in the entry, with the stack pointer `sp`, before its call was made
    /// (`is_made` is false) or behind it.
    pub fn point(self, is_made: bool, sp: u64) -> ProgramPoint {
        let ip = if is_made { self.end } else { self.end - SYSCALL.len() as u64 };
        ProgramPoint { ip, sp: sp.wrapping_add(8 + RED_ZONE) }
    }
}

/// The point of the program at which a thread is, from its point `there` in the trampoline with
/// this `code` at `at`. With `carry`, the kernel makes the call. `None` if the trampoline has the
/// `syscall` itself.
pub fn program_point(
    code: &[u8; TRAMPOLINE],
    at: u64,
    there: ProgramPoint,
    carry: bool,
) -> Option<ProgramPoint> {
    let before = code.windows(ENTER.len()).position(|bytes| bytes == ENTER)?;
    let behind = before + ENTER.len() + 4;
    let call = KeptCall::find(code.get(behind..)?.first_chunk()?, at.wrapping_add(behind as u64))?;
    let offset = usize::try_from(there.ip.checked_sub(at)?).ok()?;
    let start = call.end - SYSCALL.len() as u64;
    let next = if carry { start } else { call.end };
    let after = behind + STEP_BACK.len();
    let (ip, deeper) = match offset {
        _ if offset <= before => (start - (before - offset) as u64, 0),
        _ if offset == before + STEP => (start, RED_ZONE),
        _ if offset == behind => (next, RED_ZONE),
        _ if offset == after => (next, 0),
        _ if offset == after + TO_KEPT.len() => (call.end, 0),
        _ if offset == after + TO_KEPT.len() + JUMP => (start, 0),
        _ => return None,
    };
    Some(ProgramPoint { ip, sp: there.sp.wrapping_add(deeper) })
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
    /// The way of a bridge for calls that a thread is cancelled in (glibc 2.41): the last word of
    /// the call's arguments goes to the stack right before the call.
    #[test]
    fn a_call_with_a_variable_number_is_passed_on_at_its_own_address() {
        let mut bytes = [0; 16];
        // mov %r11,8(%rsp); syscall
        bytes[..7].copy_from_slice(&[0x4c, 0x89, 0x5c, 0x24, 8, 0x0f, 0x05]);
        let site = PatchSite { address: 0, len: 7, syscall_at: 5, number: None, bytes };
        assert!(keeps_instruction(&site));
        let there = replacement(&site, 0x1000, 0x2010);
        assert_eq!((there[0], &there[5..]), (0xe9, &SYSCALL[..]));
        let code = code(&site, 0x1000, 0x2010, 0x2000);
        assert!(code.len() <= TRAMPOLINE);
        // The stack is as deep as before when the moved instruction is executed.
        assert_eq!(code[..5], bytes[..5]);
        let jump = |from: usize| {
            assert_eq!(code[from], 0xe9);
            let by = i32::from_le_bytes(code[from + 1..from + 5].try_into().unwrap());
            0x2010 + from as i64 + 5 + i64::from(by)
        };
        let call_end = 5 + 5 + 6;
        let after = call_end + TO_SYSCALL_END as usize;
        assert_eq!(jump(after), 0x1007);
        let carry = call_end + 8;
        assert_eq!(code[carry], 0x72);
        assert_eq!(jump(carry + 2 + usize::from(code[carry + 1])), 0x1005);
        // A constant number, and instructions that follow: the trampoline has the call.
        assert!(!keeps_instruction(&PatchSite { number: Some(0), ..site }));
        assert!(!keeps_instruction(&PatchSite { len: 8, ..site }));
        assert!(!keeps_instruction(&PatchSite { syscall_at: 3, len: 5, ..site }));
        let other = replacement(&PatchSite { number: Some(0), ..site }, 0x1000, 0x2010);
        assert_eq!(other[5..], [0x90; 2]);
    }

    #[test]
    fn a_thread_in_a_trampoline_is_at_a_point_of_the_program() {
        let mut bytes = [0; 16];
        bytes[..7].copy_from_slice(&[0x4c, 0x89, 0x5c, 0x24, 8, 0x0f, 0x05]);
        let site = PatchSite { address: 0, len: 7, syscall_at: 5, number: None, bytes };
        let padded = |site: &PatchSite| {
            let mut room = [0xcc; TRAMPOLINE];
            let code = code(site, 0x1000, 0x2010, 0x2000);
            room[..code.len()].copy_from_slice(&code);
            room
        };
        let code = padded(&site);
        let at = |offset: u64, carry, deeper: u64| {
            let there = ProgramPoint { ip: 0x2010 + offset, sp: 0x9000 - deeper };
            let point = program_point(&code, 0x2010, there, carry)?;
            assert_eq!(point.sp, 0x9000, "at {offset}");
            Some(point.ip)
        };
        // The moved instruction, the step over the red zone, and the call of the entry.
        for carry in [false, true] {
            assert_eq!(at(0, carry, 0), Some(0x1000));
            assert_eq!(at(5, carry, 0), Some(0x1005));
            assert_eq!(at(10, carry, 128), Some(0x1005));
        }
        // The step back, the branch, and the two jumps.
        for (offset, deeper) in [(16, 128), (24, 0)] {
            assert_eq!(at(offset, true, deeper), Some(0x1005));
            assert_eq!(at(offset, false, deeper), Some(0x1007));
        }
        assert_eq!((at(28, false, 0), at(33, true, 0)), (Some(0x1007), Some(0x1005)));
        // No instruction begins there.
        assert_eq!((at(26, true, 0), at(38, true, 0)), (None, None));
        let call = KeptCall::find(code[16..].first_chunk().unwrap(), 0x2020).unwrap();
        assert_eq!(call.point(false, 0x9000 - 136), ProgramPoint { ip: 0x1005, sp: 0x9000 });
        assert_eq!(call.point(true, 0x9000 - 136), ProgramPoint { ip: 0x1007, sp: 0x9000 });
        let other = padded(&PatchSite { number: Some(1), ..site });
        let there = ProgramPoint { ip: 0x2010, sp: 0x9000 };
        assert_eq!(program_point(&other, 0x2010, there, true), None);
    }

    #[test]
    fn the_longest_site_has_room() {
        for (number, syscall_at) in [(None, 13), (Some(1), 13), (None, 0)] {
            let site = PatchSite { address: 0, len: 15, syscall_at, number, bytes: [0x90; 16] };
            assert!(code(&site, 0x1000, 0x2010, 0x2000).len() <= TRAMPOLINE);
            assert_eq!(replacement(&site, 0x1000, 0x2010).len(), 15);
        }
    }
}
