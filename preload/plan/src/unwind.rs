//! The ranges of functions in `.eh_frame` (Linux Standard Base, "Exception Frames"), as far as
//! compilers for x86-64 write it: pointers relative to their own place, four bytes signed.

/// First and last address (exclusive) of every function of the table `bytes` at `address`.
pub(crate) fn ranges(bytes: &[u8], address: u64) -> Vec<(u64, u64)> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while let Some(len) = number(bytes, at) {
        // 0 ends a table (others may follow, as linkers join them); !0 begins a 64-bit length,
        // which no compiler writes.
        if len == u32::MAX {
            break;
        }
        let body = at + 4;
        let next = body + len as usize;
        if len >= 12 && number(bytes, body).is_some_and(|id| id != 0) {
            let place = address + body as u64 + 4;
            if let (Some(from), Some(size)) = (number(bytes, body + 4), number(bytes, body + 8)) {
                let start = place.wrapping_add_signed(i64::from(from as i32));
                ranges.push((start, start + u64::from(size)));
            }
        }
        at = next;
    }
    ranges
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    bytes.try_into().ok().map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_of_a_frame_gives_the_range_of_its_function() {
        let mut bytes = Vec::new();
        // A common part (its id is 0), then a frame that points back to it.
        bytes.extend_from_slice(&[12, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(&12u32.to_le_bytes());
        bytes.extend_from_slice(&20u32.to_le_bytes());
        bytes.extend_from_slice(&(-0x100i32).to_le_bytes());
        bytes.extend_from_slice(&0x30u32.to_le_bytes());
        bytes.extend_from_slice(&[0, 0, 0, 0]);
        let start = 0x5000 + 24 - 0x100;
        assert_eq!(ranges(&bytes, 0x5000), [(start, start + 0x30)]);
        assert!(ranges(&bytes[..20], 0x5000).is_empty());
    }
}
