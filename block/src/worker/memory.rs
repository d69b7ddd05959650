//! Memory on a NUMA node, mbind(2).

use crate::{Errno, MemoryRegion, Result};

/// Takes pages of the node if it has any, and else of others (linux/mempolicy.h).
const MPOL_PREFERRED: libc::c_long = 1;
/// Moves pages that are there already.
const MPOL_MF_MOVE: libc::c_ulong = 2;
/// Nodes of one word.
const NODES: u32 = libc::c_ulong::BITS - 1;

/// Moves the memory of `region` to `node`, as far as the node has room.
///
/// # Errors
///
/// `EINVAL` for a node that the machine does not have, and the errors of mbind(2).
pub(super) fn move_to(region: &MemoryRegion, node: u32) -> Result<()> {
    if node >= NODES {
        return Err(Errno::INVAL);
    }
    let mask: libc::c_ulong = 1 << node;
    // SAFETY: the range is the mapping of the region, which the borrow keeps alive; the call
    // changes no byte in it, and reads one word of `mask`, whose stated length is one bit more than
    // the kernel reads.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            region.start(),
            region.bytes(),
            MPOL_PREFERRED,
            &raw const mask,
            libc::c_ulong::from(NODES + 1),
            MPOL_MF_MOVE,
        )
    };
    match rc {
        0 => Ok(()),
        _ => Err(last_error()),
    }
}

fn last_error() -> Errno {
    let code = std::io::Error::last_os_error().raw_os_error();
    Errno::from_raw_os_error(code.unwrap_or(libc::EIO))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nodes of all pages, move_pages(2).
    fn nodes_of(region: &MemoryRegion) -> Vec<i32> {
        let pages: Vec<_> = (0..region.frames() as usize)
            .map(|frame| region.start().wrapping_add(frame * crate::FRAME))
            .collect();
        let mut status = vec![-1_i32; pages.len()];
        // SAFETY: the kernel reads `pages` and writes `status`, which have the length that is
        // passed to it. Without nodes it moves nothing.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                pages.len(),
                pages.as_ptr(),
                std::ptr::null::<i32>(),
                status.as_mut_ptr(),
                0,
            )
        };
        assert_eq!(rc, 0, "{}", last_error());
        status
    }

    #[test]
    fn memory_is_on_the_node_that_was_asked_for() {
        let node = super::super::topology::first_node().expect("a machine has a node");
        let region = MemoryRegion::new(12).unwrap();
        let mut before = region.take(4).unwrap();
        before.fill(1);
        match move_to(&region, node) {
            Err(Errno::NOSYS | Errno::PERM) => return println!("not here: no mbind(2)"),
            moved => moved.unwrap(),
        }
        region.take(8).unwrap().fill(2);
        assert_eq!(nodes_of(&region), vec![node as i32; 12]);
        assert!(before.iter().all(|byte| *byte == 1));
    }

    #[test]
    fn a_node_that_the_machine_does_not_have_is_an_error() {
        let region = MemoryRegion::new(1).unwrap();
        for node in [62, 63, 1000] {
            assert!(move_to(&region, node).is_err(), "{node}");
        }
    }
}
