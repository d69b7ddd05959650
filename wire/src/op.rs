//! The names of opcodes for measurements.

use std::sync::LazyLock;

use defuse_probe::Op;

use crate::abi::Opcode;

/// The operation that counts requests of `opcode`.
pub fn op_of(opcode: Opcode) -> Op {
    static OPS: LazyLock<[Op; 64]> = LazyLock::new(|| {
        let mut ops = [Op::UNKNOWN; 64];
        for &opcode in Opcode::ALL {
            if let Some(op) = ops.get_mut(opcode as usize) {
                // An opcode with `_64` is the same operation with another reply width.
                let name = opcode.name().trim_end_matches("_64");
                *op = Op::parse(name).unwrap_or(Op::UNKNOWN);
            }
        }
        ops
    });
    OPS.get(opcode as usize).copied().unwrap_or(Op::UNKNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_opcode_of_a_file_system_is_counted_under_its_own_name() {
        for &opcode in Opcode::ALL {
            let counted = op_of(opcode) != Op::UNKNOWN;
            assert_eq!(counted, opcode != Opcode::CuseInit, "{}", opcode.name());
        }
    }
}
