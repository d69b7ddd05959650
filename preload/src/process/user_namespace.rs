//! Users of a program that has entered a user namespace other than the run's, user_namespaces(7).
//!
//! The program sees the ids of its namespace, and the server of a mount the ids of the run's
//! namespace. So the credentials of a thread are kept as the server knows them, and ids are
//! exchanged where the program sees or sets them. That is right for mounts that another process
//! serves: the kernel does it for a directory in the process itself, so that nothing is exchanged
//! in a run with such a directory. The kernel shows how the ids of a namespace are mapped to its
//! parent namespace, which is assumed to be the run's.

use std::sync::atomic::{AtomicBool, Ordering};

use defuse_direct::TaskCredentials;
use defuse_fs::Errno;

use crate::machine::lock::FutexLock;

/// The id that the kernel shows in place of one that is not mapped
/// (`/proc/sys/kernel/overflowuid`).
const OVERFLOW: u32 = 65534;
/// The kernel has no more lines in a map.
const MOST_LINES: usize = 340;

/// True once the process is in another namespace. Children have a copy, and the execution state
/// passes it to the next program.
static ENTERED: AtomicBool = AtomicBool::new(false);

static STATE: FutexLock<IdMapState> =
    FutexLock::new(IdMapState { maps: [Vec::new(), Vec::new()], user: OVERFLOW, group: OVERFLOW });

/// The kind of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdKind {
    Users = 0,
    Groups = 1,
}

struct IdMapState {
    /// Of users and groups. Empty until a process has written them.
    maps: [Vec<IdMapExtent>; 2],
    /// The user and group of the process, as the server knows them, when it entered the namespace.
    user: u32,
    group: u32,
}

/// A line of /proc/PID/uid_map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct IdMapExtent {
    inside: u32,
    outside: u32,
    len: u32,
}

/// The process has entered a namespace. Before, it had these ids.
pub fn enter(user: u32, group: u32) {
    let mut state = STATE.lock();
    (state.user, state.group) = (user, group);
    state.maps.iter_mut().for_each(Vec::clear);
    ENTERED.store(true, Ordering::Release);
}

/// True if ids are exchanged.
#[inline]
pub fn is_entered() -> bool {
    ENTERED.load(Ordering::Acquire)
}

/// True if there are maps for both kinds, which then stay as they are.
pub fn is_mapped() -> bool {
    with(IdKind::Users, |map| !map.is_empty()) && with(IdKind::Groups, |map| !map.is_empty())
}

fn with<T>(kind: IdKind, look: impl FnOnce(&[IdMapExtent]) -> T) -> T {
    let mut state = STATE.lock();
    let map = &mut state.maps[kind as usize];
    if map.is_empty() {
        let name = ["uid_map", "gid_map"][kind as usize];
        *map = std::fs::read_to_string(format!("/proc/self/{name}"))
            .map_or(Vec::new(), |text| parse(&text));
    }
    look(map)
}

fn parse(text: &str) -> Vec<IdMapExtent> {
    let extent = |line: &str| {
        let mut numbers = line.split_ascii_whitespace().map(|word| word.parse().ok());
        let [inside, outside, len] = [numbers.next()??, numbers.next()??, numbers.next()??];
        Some(IdMapExtent { inside, outside, len })
    };
    text.lines().take(MOST_LINES).filter_map(extent).collect()
}

fn map_outward(map: &[IdMapExtent], id: u32) -> Option<u32> {
    let extent = map.iter().find(|extent| id.wrapping_sub(extent.inside) < extent.len)?;
    extent.outside.checked_add(id - extent.inside)
}

fn map_inward(map: &[IdMapExtent], id: u32) -> Option<u32> {
    let extent = map.iter().find(|extent| id.wrapping_sub(extent.outside) < extent.len)?;
    extent.inside.checked_add(id - extent.outside)
}

/// The id of the program for one of the server.
pub fn to_program(kind: IdKind, id: u32) -> u32 {
    if is_entered() { with(kind, |map| map_inward(map, id)).unwrap_or(OVERFLOW) } else { id }
}

/// The id of the server for one of the program. `EINVAL` if it is not mapped.
pub fn to_server(kind: IdKind, id: u32) -> Result<u32, Errno> {
    if is_entered() { with(kind, |map| map_outward(map, id)).ok_or(Errno::EINVAL) } else { Ok(id) }
}

/// The credentials from the kernel, converted to the server's ids. Capabilities are those that hold
/// in the namespace.
pub fn credentials(own: TaskCredentials) -> TaskCredentials {
    let (user, group) = {
        let state = STATE.lock();
        (state.user, state.group)
    };
    let is_user = |id| {
        with(IdKind::Users, |map| if map.is_empty() { Some(user) } else { map_outward(map, id) })
    };
    let is_group = |id| {
        with(IdKind::Groups, |map| if map.is_empty() { Some(group) } else { map_outward(map, id) })
    };
    let user = |id| is_user(id).unwrap_or(OVERFLOW);
    let group = |id| is_group(id).unwrap_or(OVERFLOW);
    TaskCredentials {
        uid: user(own.uid),
        gid: group(own.gid),
        real_uid: user(own.real_uid),
        real_gid: group(own.real_gid),
        groups: own.groups.iter().map(|id| group(*id)).collect(),
        caps: 0,
        pid: own.pid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_exchanged_by_the_lines_of_a_map() {
        let map = parse("         0       1000          1\n         1     100000      65536\n");
        assert_eq!(map.len(), 2);
        for (own, other) in [(0, 1000), (1, 100_000), (65_536, 165_535)] {
            assert_eq!((map_outward(&map, own), map_inward(&map, other)), (Some(other), Some(own)));
        }
        assert_eq!((map_outward(&map, 65_537), map_inward(&map, 999)), (None, None));
        assert!(parse("").is_empty() && parse("x y z\n1 2").is_empty());
        let all = parse("0 0 4294967295");
        assert_eq!((map_outward(&all, 77), map_outward(&all, u32::MAX)), (Some(77), None));
    }
}
