//! From machine code to sites: which instructions around a `syscall` can make room for a jump.

use std::collections::BTreeSet;

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register,
};

use crate::plan::PatchSite;

/// A jump to anywhere within 2 GiB: one byte and a displacement of four.
const JUMP: usize = 5;
/// Most bytes that a site replaces: what [`PatchSite::bytes`] holds.
const MOST: usize = 15;

/// A `syscall` instruction that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SyscallInstruction {
    /// Where it is.
    pub address: u64,
    /// The number in `eax`, if it is known.
    pub number: Option<u16>,
    /// How to replace it; `None` if there is no room.
    pub site: Option<PatchSite>,
    /// It is an instruction of a function in which everything is one. Otherwise the bytes may be
    /// data.
    pub is_code: bool,
}

/// The bytes of the instruction.
pub(crate) const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// The bytes of the instruction for calls of 32 bits, `int 0x80`.
pub(crate) const SYSCALL_32: [u8; 2] = [0xcd, 0x80];

/// Bytes of `code` at `at` between functions that look like the instruction. They are one if
/// `mov eax, NUMBER` comes right before.
pub(crate) fn find_between_functions(code: &[u8], at: usize, address: u64) -> SyscallInstruction {
    /// Numbers of system calls are less.
    const MOST: u32 = 512;
    let before = at.checked_sub(5).and_then(|from| code.get(from..at));
    let number = before.filter(|bytes| bytes[0] == 0xb8).and_then(|bytes| {
        let number = u32::from_le_bytes(bytes[1..].try_into().ok()?);
        u16::try_from(number).ok().filter(|_| number < MOST)
    });
    SyscallInstruction { address, number, site: None, is_code: number.is_some() }
}

/// The `syscall` instructions of the function with this `code` at `address`, whose description ends
/// at `own_end`.
///
/// The code is decoded from its first byte on, so that instructions are what the processor sees.
/// Where a branch leads into a place that would be replaced, that place is not offered; the targets
/// of jump tables are no branches, but compilers let them begin blocks, and the `syscall` of a
/// block and its neighbours are never split by one (the number is loaded in the same block).
pub(crate) fn function(code: &[u8], address: u64, own_end: u64) -> Vec<SyscallInstruction> {
    let decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    let all: Vec<Instruction> = decoder.into_iter().collect();
    let targets: BTreeSet<u64> = all.iter().filter_map(target).collect();
    // Behind the description there may be data, and data is not to be changed.
    let own = all.iter().take_while(|instruction| instruction.ip() < own_end);
    let is_own_code = !own.clone().any(Instruction::is_invalid);
    let is_all_code = is_own_code && !all.iter().any(Instruction::is_invalid);
    let mut numbers = RegisterConstants::default();
    let mut found = Vec::new();
    for (place, instruction) in all.iter().enumerate() {
        if instruction.code() == Code::Syscall {
            let number =
                numbers.eax().or_else(|| return_of_signal(code, address, instruction.ip()));
            let site = site(&all, place, &targets, code, address);
            let site = site.map(|site| PatchSite { number, ..site });
            let is_own = instruction.ip() < own_end;
            let is_code = if is_own { is_own_code } else { is_all_code && number.is_some() };
            found.push(SyscallInstruction { address: instruction.ip(), number, site, is_code });
        }
        if instruction.code() == Code::Int_imm8 && instruction.immediate8() == SYSCALL_32[1] {
            let is_code = is_own_code && instruction.ip() < own_end;
            found.push(SyscallInstruction {
                address: instruction.ip(),
                number: None,
                site: None,
                is_code,
            });
        }
        numbers.apply(instruction);
    }
    found
}

/// The number of rt_sigreturn(2), if the instruction at `ip` is the call that ends a signal
/// handler. Unwinders know its bytes, `mov rax, 15; syscall`. Its description begins a byte before
/// it, in the middle of an instruction without effect, so that decoding from there may miss the
/// number.
fn return_of_signal(code: &[u8], address: u64, ip: u64) -> Option<u16> {
    const LOAD: [u8; 7] = [0x48, 0xc7, 0xc0, 15, 0, 0, 0];
    let at = usize::try_from(ip - address).ok()?;
    code[..at].ends_with(&LOAD).then_some(15)
}

fn target(instruction: &Instruction) -> Option<u64> {
    let near = matches!(
        instruction.op0_kind(),
        OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
    );
    near.then(|| instruction.near_branch_target())
}

/// The instructions from the `syscall` at `place` backwards or forwards that make room and can be
/// moved. Backwards first: then what follows the call stays where it is.
fn site(
    all: &[Instruction],
    place: usize,
    targets: &BTreeSet<u64>,
    code: &[u8],
    address: u64,
) -> Option<PatchSite> {
    let ranges = [(1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (3, 0), (2, 1)];
    ranges.into_iter().find_map(|(before, after)| {
        let range = place.checked_sub(before)?..place + after + 1;
        let part = all.get(range)?;
        let (start, end) = (part.first()?.ip(), part.last()?.next_ip());
        let len = usize::try_from(end - start).ok()?;
        let inside = targets.range(start + 1..end).next().is_some();
        let moves = part.iter().enumerate().all(|(at, one)| at == before || can_move(one));
        if !(JUMP..=MOST).contains(&len) || inside || !moves {
            return None;
        }
        let from = usize::try_from(start - address).ok()?;
        let mut bytes = [0; 16];
        bytes[..len].copy_from_slice(code.get(from..from + len)?);
        let syscall_at = u8::try_from(all[place].ip() - start).ok()?;
        Some(PatchSite { address: start, len: len as u8, syscall_at, number: None, bytes })
    })
}

/// True if an instruction has the same effect at any address.
fn can_move(instruction: &Instruction) -> bool {
    instruction.flow_control() == FlowControl::Next
        && !instruction.is_ip_rel_memory_operand()
        // An instruction that uses the stack pointer would see the trampoline's stack only if it
        // were between the jump and the call; it is not, but instructions that move the stack
        // pointer are left alone.
        && !instruction.is_stack_instruction()
}

/// Constants in registers, as far as a walk through the instructions in their order finds them.
#[derive(Default)]
struct RegisterConstants {
    known: [Option<u32>; 16],
}

impl RegisterConstants {
    fn eax(&self) -> Option<u16> {
        self.known[0].and_then(|number| u16::try_from(number).ok())
    }

    fn apply(&mut self, instruction: &Instruction) {
        if instruction.code() == Code::Syscall {
            // The kernel keeps all registers but rax, rcx and r11.
            [0, 1, 11].iter().for_each(|&at| self.known[at] = None);
            return;
        }
        if matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall) {
            // rax, rcx, rdx, rsi, rdi and r8 to r11 belong to the called function.
            [0, 1, 2, 6, 7, 8, 9, 10, 11].iter().for_each(|&at| self.known[at] = None);
            return;
        }
        if instruction.op_count() == 0 || instruction.op0_kind() != OpKind::Register {
            return;
        }
        if matches!(instruction.mnemonic(), Mnemonic::Cmp | Mnemonic::Test | Mnemonic::Push) {
            return;
        }
        let register = instruction.op0_register();
        if !register.is_gpr() {
            return;
        }
        let at = register.full_register().number();
        self.known[at] = match instruction.mnemonic() {
            Mnemonic::Mov => self.find_moved_constant(instruction),
            Mnemonic::Xor if is_same(instruction) => Some(0),
            _ => None,
        };
    }

    fn find_moved_constant(&self, instruction: &Instruction) -> Option<u32> {
        if instruction.op0_register().size() < 4 {
            return None;
        }
        match instruction.op1_kind() {
            OpKind::Immediate32 => Some(instruction.immediate32()),
            OpKind::Immediate32to64 => u32::try_from(instruction.immediate32to64()).ok(),
            OpKind::Register if instruction.op1_register().is_gpr() => {
                self.known[instruction.op1_register().full_register().number()]
            }
            _ => None,
        }
    }
}

fn is_same(instruction: &Instruction) -> bool {
    instruction.op1_kind() == OpKind::Register
        && instruction.op0_register() == instruction.op1_register()
        && instruction.op0_register() != Register::None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_before_the_call_makes_room() {
        // mov $0x101,%eax; syscall; ret
        let code = [0xb8, 1, 1, 0, 0, 0x0f, 0x05, 0xc3];
        let found = function(&code, 0x1000, u64::MAX);
        assert_eq!((found.len(), found[0].number), (1, Some(257)));
        let site = found[0].site.unwrap();
        assert_eq!((site.address, site.len, site.syscall_at), (0x1000, 7, 5));
        assert_eq!(site.bytes[..7], code[..7]);
    }

    #[test]
    fn what_follows_makes_room_where_the_number_is_short() {
        // xor %eax,%eax; syscall; cmp $-4096,%rax; ja +2; ret
        let code = [0x31, 0xc0, 0x0f, 0x05, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff, 0x77, 1, 0xc3, 0xc3];
        let found = function(&code, 0x1000, u64::MAX);
        let site = found[0].site.unwrap();
        assert_eq!(
            (found[0].number, site.address, site.len, site.syscall_at),
            (Some(0), 0x1002, 8, 0)
        );
    }

    #[test]
    fn a_branch_into_the_middle_forbids_the_place() {
        // mov $1,%eax; syscall; jmp to the syscall
        let code = [0xb8, 1, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xfc];
        assert_eq!(function(&code, 0x1000, u64::MAX)[0].site, None);
    }

    #[test]
    fn what_depends_on_its_address_is_not_moved() {
        // lea 0x10(%rip),%rsi; syscall; jmp +0
        let code = [0x48, 0x8d, 0x35, 0x10, 0, 0, 0, 0x0f, 0x05, 0xeb, 0];
        assert_eq!(function(&code, 0x1000, u64::MAX)[0].site, None);
    }

    #[test]
    fn a_table_among_the_functions_is_no_code() {
        // syscall; ret, and the same before bytes that are no instruction in 64-bit mode.
        let is_code = |code: &[u8], own_end| function(code, 0, own_end)[0].is_code;
        let (call, table) = ([0x0f, 0x05, 0xc3], [0x0f, 0x05, 0xc3, 0x06, 0x0e]);
        assert!(is_code(&call, 3) && !is_code(&table, 5));
        // Behind the function that its description names.
        assert!(is_code(&table, 3) && !is_code(&call, 0));
        let between = |code: &[u8], at| {
            let found = find_between_functions(code, at, 0);
            (found.number, found.is_code)
        };
        assert_eq!(between(&call, 0), (None, false));
        assert_eq!(between(&[0xb8, 1, 1, 0, 0, 0x0f, 0x05], 5), (Some(257), true));
        assert_eq!(between(&[0xb8, 1, 1, 0, 9, 0x0f, 0x05], 5), (None, false));
    }

    /// Processes ended without a word to us: `_exit` of the C library has two calls in a row.
    #[test]
    fn a_number_is_kept_by_the_kernel() {
        // mov $231,%esi; mov $60,%eax; syscall; mov %esi,%eax; syscall; ret
        let code = [0xbe, 231, 0, 0, 0, 0xb8, 60, 0, 0, 0, 0x0f, 5, 0x89, 0xf0, 0x0f, 5, 0xc3];
        let numbers: Vec<_> = function(&code, 0, u64::MAX).iter().map(|f| f.number).collect();
        assert_eq!(numbers, [Some(60), Some(231)]);
    }

    /// Programs on glibc 2.41 made no files: the bridge for all calls in which a thread can be
    /// cancelled was left to the kernel. This has the shape of that bridge: the number is in a
    /// register, and so are arguments that came on the stack.
    #[test]
    fn a_bridge_for_calls_with_a_number_in_a_register_is_replaced() {
        let start = [
            0xf6, 0x07, 8, // testb $8,(%rdi)
            0x75, 30, // jne behind the end
            0x48, 0x89, 0xf0, // mov %rsi,%rax
            0x48, 0x89, 0xd7, // mov %rdx,%rdi
        ];
        let call = [
            &[0x4c, 0x8b, 0x4c, 0x24, 16][..], // mov 16(%rsp),%r9
            &[0x4c, 0x89, 0x5c, 0x24, 8],      // mov %r11,8(%rsp)
            &SYSCALL,
        ];
        let code = [&start[..], &call.concat(), &[0xc3]].concat();
        let found = function(&code, 0x1000, u64::MAX);
        assert_eq!((found.len(), found[0].number, found[0].is_code), (1, None, true));
        let site = found[0].site.unwrap();
        assert_eq!((site.address, site.len, site.syscall_at), (0x1010, 7, 5));
        assert_eq!(site.bytes[..7], code[16..23]);
        // Numbers that come from the stack and from memory.
        for load in [&[0x48, 0x8b, 0x44, 0x24, 16][..], &[0x48, 0x8b, 0x50, 0x18, 0x8b, 0]] {
            let code = [load, &SYSCALL, &[0xc3]].concat();
            let found = function(&code, 0, u64::MAX)[0];
            let site = found.site.unwrap();
            assert_eq!((found.number, usize::from(site.syscall_at)), (None, load.len()));
        }
    }

    /// An instruction that moves the stack pointer by a push, or returns, is not moved.
    #[test]
    fn what_pushes_or_returns_is_not_moved() {
        // push %rdi; push %rsi; push %rdx; syscall; ret
        let code = [0x57, 0x56, 0x52, 0x0f, 0x05, 0xc3];
        assert_eq!(function(&code, 0, u64::MAX)[0].site, None);
    }

    #[test]
    fn the_return_of_a_signal_is_known_where_its_description_begins_early() {
        // The last byte of a longer instruction, then mov $15,%rax; syscall; an instruction without
        // effect.
        let code = [0, 0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05, 0x0f, 0x1f, 0x80, 0, 0, 0, 0];
        let numbers = |code: &[u8]| function(code, 0, 10).first().map(|found| found.number);
        assert_eq!(numbers(&code), Some(Some(15)));
        assert_eq!(numbers(&code[1..]), Some(Some(15)));
    }

    #[test]
    fn a_call_of_32_bits_is_found_and_stays() {
        // mov $5,%eax; int $0x80; ret
        let found = function(&[0xb8, 5, 0, 0, 0, 0xcd, 0x80, 0xc3], 0x1000, u64::MAX);
        let found =
            found.iter().map(|found| (found.address, found.number, found.site, found.is_code));
        assert_eq!(found.collect::<Vec<_>>(), [(0x1005, None, None, true)]);
        assert!(function(&[0xcd, 3, 0xc3], 0, u64::MAX).is_empty());
    }

    #[test]
    fn a_number_is_followed_through_registers() {
        // mov $5,%r8d; mov %r8d,%eax; syscall; ret
        let code = [0x41, 0xb8, 5, 0, 0, 0, 0x44, 0x89, 0xc0, 0x0f, 0x05, 0xc3];
        assert_eq!(function(&code, 0, u64::MAX)[0].number, Some(5));
    }

    /// The last system call of exit(3) was not replaced: its number is in a register that an
    /// earlier one leaves as it is. So a program that returned from main notified no server of its
    /// end.
    #[test]
    fn a_call_leaves_the_registers_as_they_are() {
        // mov $231,%esi; mov $60,%edx; mov %edx,%eax; syscall; mov %esi,%eax; syscall; ret
        let code = [
            0xbe, 231, 0, 0, 0, 0xba, 60, 0, 0, 0, 0x89, 0xd0, 0x0f, 0x05, 0x89, 0xf0, 0x0f, 0x05,
            0xc3,
        ];
        let numbers: Vec<_> =
            function(&code, 0, u64::MAX).iter().map(|found| found.number).collect();
        assert_eq!(numbers, [Some(60), Some(231)]);
    }
}
