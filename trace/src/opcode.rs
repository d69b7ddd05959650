//! Opcodes of the protocol (`enum fuse_opcode` of linux/fuse.h).

use defuse_probe::Op;

const NUMBERS: &[(u32, Op)] = &[
    (1, Op::LOOKUP),
    (2, Op::FORGET),
    (3, Op::GETATTR),
    (4, Op::SETATTR),
    (5, Op::READLINK),
    (6, Op::SYMLINK),
    (8, Op::MKNOD),
    (9, Op::MKDIR),
    (10, Op::UNLINK),
    (11, Op::RMDIR),
    (12, Op::RENAME),
    (13, Op::LINK),
    (14, Op::OPEN),
    (15, Op::READ),
    (16, Op::WRITE),
    (17, Op::STATFS),
    (18, Op::RELEASE),
    (20, Op::FSYNC),
    (21, Op::SETXATTR),
    (22, Op::GETXATTR),
    (23, Op::LISTXATTR),
    (24, Op::REMOVEXATTR),
    (25, Op::FLUSH),
    (26, Op::INIT),
    (27, Op::OPENDIR),
    (28, Op::READDIR),
    (29, Op::RELEASEDIR),
    (30, Op::FSYNCDIR),
    (31, Op::GETLK),
    (32, Op::SETLK),
    (33, Op::SETLKW),
    (34, Op::ACCESS),
    (35, Op::CREATE),
    (36, Op::INTERRUPT),
    (37, Op::BMAP),
    (38, Op::DESTROY),
    (39, Op::IOCTL),
    (40, Op::POLL),
    (41, Op::NOTIFY_REPLY),
    (42, Op::BATCH_FORGET),
    (43, Op::FALLOCATE),
    (44, Op::READDIRPLUS),
    (45, Op::RENAME2),
    (46, Op::LSEEK),
    (47, Op::COPY_FILE_RANGE),
    (48, Op::SETUPMAPPING),
    (49, Op::REMOVEMAPPING),
    (50, Op::SYNCFS),
    (51, Op::TMPFILE),
    (52, Op::STATX),
    // COPY_FILE_RANGE_64, the variant with a 64-bit reply.
    (53, Op::COPY_FILE_RANGE),
];

/// The operation of an opcode; [`Op::UNKNOWN`] for an unknown one.
pub fn op_of(opcode: u32) -> Op {
    NUMBERS.iter().find(|(number, _)| *number == opcode).map_or(Op::UNKNOWN, |(_, op)| *op)
}

/// The first opcode of an operation; `None` for [`Op::UNKNOWN`], and for what the kernel does not
/// request: [`Op::RESOLVE`] and [`Op::COMPOUND`].
pub fn number_of(op: Op) -> Option<u32> {
    NUMBERS.iter().find(|(_, known)| *known == op).map(|(number, _)| *number)
}

/// A bit mask of the opcodes of these operations, for the BPF program.
pub(crate) fn bits_of(ops: &[Op]) -> u64 {
    let numbers = NUMBERS.iter().filter(|(_, op)| ops.contains(op));
    numbers.fold(0, |bits, (number, _)| bits | 1 << number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_and_operations_match_in_both_directions() {
        for op in Op::ALL.iter().copied() {
            match op {
                Op::UNKNOWN | Op::RESOLVE | Op::COMPOUND => assert_eq!(number_of(op), None),
                _ => assert_eq!(number_of(op).map(op_of), Some(op)),
            }
        }
        assert_eq!(
            (op_of(7), op_of(4096), number_of(Op::UNKNOWN)),
            (Op::UNKNOWN, Op::UNKNOWN, None)
        );
        assert!(NUMBERS.is_sorted_by_key(|(number, _)| *number));
        assert_eq!(bits_of(&[Op::READ, Op::COPY_FILE_RANGE]), 1 << 15 | 1 << 47 | 1 << 53);
    }

    #[test]
    fn the_header_of_the_system_has_the_same_numbers() {
        let Ok(header) = std::fs::read_to_string("/usr/include/linux/fuse.h") else {
            println!("skipped: linux/fuse.h is not there (apt-get install linux-libc-dev)");
            return;
        };
        for op in Op::ALL.iter().copied() {
            let wanted = format!("FUSE_{}", op.name());
            let line = header.lines().find(|line| line.split_whitespace().next() == Some(&wanted));
            let number = line.and_then(|line| line.split('=').nth(1)?.trim().split(',').next());
            if let Some(number) = number {
                assert_eq!(number.trim().parse().ok(), number_of(op), "{wanted}");
            }
        }
    }
}
