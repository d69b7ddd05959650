//! The structures of an image in readable form. Damaged structures are shown as far as they can be
//! read.

use std::collections::HashSet;

use defuse_block::{BlockDevice, BlockingQueue};
use defuse_fs::source::{self, DumpCell, DumpTable, SourceOpenError, WorkWatch};

use super::{OpenImage, unusable};
use crate::commit::{CommitRules, ScannedSlot};
use crate::format::inode::{DecodedBody, DiskInode, InodeData};
use crate::format::slot::{SlotHeader, SlotKind};
use crate::format::superblock::{COPIES, Superblock, SuperblockError};
use crate::format::{BLOCK, UNIT_BLOCKS};
use crate::load;
use crate::store::{SlotSurvey, StoreError, device_error, slots, survey_with_slots};

/// A row of cells.
macro_rules! row {
    ($($cell:expr),* $(,)?) => { vec![$(DumpCell::from($cell)),*] };
}

/// The tables of the whole image, or of one inode.
pub(super) fn dump(image: &OpenImage, ino: Option<u64>) -> source::SourceResult<Vec<DumpTable>> {
    let shown = image.path.display();
    let tables = tables(&*image.device, ino, &*image.watch);
    match (tables.map_err(|error| unusable(&image.path, &*image.device, &error))?, ino) {
        (Some(tables), _) => Ok(tables),
        (None, ino) => Err(SourceOpenError::Failed(format!(
            "{shown} has no slot of inode {}: `ls -i` shows the numbers of files",
            ino.unwrap_or_default()
        ))),
    }
}

/// The tables of the whole device, or of one inode; `None` if no slot is about it.
pub(crate) fn tables(
    device: &dyn BlockDevice,
    ino: Option<u64>,
    watch: &dyn WorkWatch,
) -> Result<Option<Vec<DumpTable>>, StoreError> {
    let mut scanned = Vec::new();
    let survey =
        survey_with_slots(device, CommitRules::ALL, |slots| scanned = slots.to_vec(), watch);
    match (survey, ino) {
        (Ok(survey), None) => collect_tables(device, &survey, &scanned, watch).map(Some),
        (Ok(survey), Some(ino)) => inode(device, &survey, &scanned, ino),
        // If the image cannot be opened, the copies of the superblock show why.
        (Err(StoreError::Unusable(_) | StoreError::Short { .. } | StoreError::Numbers), None) => {
            superblocks(device).map(|table| Some(vec![table]))
        }
        (Err(error), _) => Err(error),
    }
}

fn collect_tables(
    device: &dyn BlockDevice,
    survey: &SlotSurvey,
    scanned: &[(u64, ScannedSlot)],
    watch: &dyn WorkWatch,
) -> Result<Vec<DumpTable>, StoreError> {
    let (_, pool, problems) = load::load(device, survey, u64::MAX, watch)?;
    let units = pool.space().classes();
    let units = units.into_iter().map(|(class, units, free)| row![class, units, free]).collect();
    let problems = problems.iter().map(|problem| row![problem.to_string()]).collect();
    Ok(vec![
        superblocks(device)?,
        DumpTable { name: "units", columns: &["class", "units", "free_blocks"], rows: units },
        chunks(&survey.superblock),
        slots_by_state(survey, scanned),
        groups(survey, scanned),
        DumpTable { name: "problems", columns: &["problem"], rows: problems },
    ])
}

fn superblocks(device: &dyn BlockDevice) -> Result<DumpTable, StoreError> {
    let mut line = BlockingQueue::new(device).map_err(device_error("open a queue"))?;
    let copies = COPIES.map(|block| {
        let mut bytes = vec![0; BLOCK];
        let read = line.read(block, &mut bytes);
        (block, read.map(|()| Superblock::decode(&bytes)))
    });
    let epochs = copies.iter().filter_map(|(_, copy)| copy.as_ref().ok()?.as_ref().ok());
    let newest = epochs.map(|copy| copy.epoch).max();
    let rows = copies.iter().map(|(block, copy)| {
        let state = match copy {
            Ok(Ok(copy)) if Some(copy.epoch) == newest => "newest".to_owned(),
            Ok(Ok(_)) => "older".to_owned(),
            Ok(Err(SuperblockError::Other)) => "none".to_owned(),
            Ok(Err(SuperblockError::Damaged)) => "damaged".to_owned(),
            Ok(Err(newer)) => newer.to_string(),
            Err(errno) => format!("unreadable: {errno}"),
        };
        match copy {
            Ok(Ok(copy)) => row![
                *block,
                state,
                copy.epoch,
                copy.blocks,
                copy.durable,
                copy.next_ino,
                copy.chunks.len(),
                copy.snapshot.map_or(0, |at| at.block)
            ],
            _ => row![*block, state, "", "", "", "", "", ""],
        }
    });
    let columns: &[&str] =
        &["block", "state", "epoch", "blocks", "durable_group", "next_inode", "chunks", "snapshot"];
    Ok(DumpTable { name: "superblocks", columns, rows: rows.collect() })
}

/// The chunks without their keys: knowledge of a key allows writing data that passes for slots.
fn chunks(superblock: &Superblock) -> DumpTable {
    let rows = superblock.chunks.iter().map(|chunk| {
        let units = u64::from(chunk.units);
        row![chunk.first_unit, units, units * UNIT_BLOCKS]
    });
    DumpTable { name: "chunks", columns: &["first_unit", "units", "slots"], rows: rows.collect() }
}

/// The identities that can be read in a slot.
fn identities(scanned: &ScannedSlot) -> impl Iterator<Item = &SlotHeader> {
    let (one, other) = match scanned {
        ScannedSlot::Whole(identity, _) => (identity, None),
        ScannedSlot::Broken(one, other) => (one, other.as_ref()),
    };
    std::iter::once(one).chain(other)
}

fn slots_by_state(survey: &SlotSurvey, scanned: &[(u64, ScannedSlot)]) -> DumpTable {
    const STATES: [&str; 6] = [COUNTS, OLDER, REMOVALS, UNFINISHED, DAMAGED, TORN];
    let mut counts = [0_u64; STATES.len()];
    for (block, slot) in scanned {
        let state = state(survey, *block, slot);
        let at = STATES.iter().position(|known| *known == state);
        at.into_iter().for_each(|at| counts[at] += 1);
    }
    let unreadable = survey.unreadable.len() as u64;
    let empty = slots(&survey.superblock) - scanned.len() as u64 - unreadable;
    let lists = survey.superblock.table_blocks().len() as u64;
    let others = [("unreadable", unreadable), ("lists", lists), ("empty", empty)];
    let all = STATES.into_iter().zip(counts).chain(others);
    let rows = all.map(|(state, slots)| row![state, slots]).collect();
    DumpTable { name: "slots", columns: &["state", "slots"], rows }
}

const COUNTS: &str = "counts";
const OLDER: &str = "older";
const REMOVALS: &str = "removals";
const UNFINISHED: &str = "unfinished";
const DAMAGED: &str = "damaged";
const TORN: &str = "torn";

fn state(survey: &SlotSurvey, block: u64, slot: &ScannedSlot) -> &'static str {
    let found = &survey.found;
    if found.void.binary_search(&block).is_ok() {
        return UNFINISHED;
    }
    let ino = identities(slot).max_by_key(|identity| identity.stamp).map_or(0, |newest| newest.ino);
    match slot {
        ScannedSlot::Whole(SlotHeader { kind: SlotKind::Removals, .. }, _) => REMOVALS,
        _ if found.live.get(&ino).is_some_and(|version| version.block == block) => COUNTS,
        _ if found.damaged.get(&ino).is_some_and(|version| version.block == block) => DAMAGED,
        ScannedSlot::Whole(..) => OLDER,
        ScannedSlot::Broken(..) => TORN,
    }
}

fn groups(survey: &SlotSurvey, scanned: &[(u64, ScannedSlot)]) -> DumpTable {
    let found = &survey.found;
    let beyond: HashSet<u64> = scanned
        .iter()
        .flat_map(|(_, slot)| identities(slot))
        .filter_map(|identity| (identity.group > found.durable).then_some(identity.group))
        .collect();
    let rows = vec![
        row!["newest durable", found.durable],
        row!["durable by the superblock", survey.superblock.durable],
        row!["unfinished", beyond.len()],
        row!["next stamp", found.next_stamp],
        row!["next inode", found.next_ino],
    ];
    DumpTable { name: "groups", columns: &["figure", "value"], rows }
}

/// The tables of an inode; `None` if no slot is about it.
fn inode(
    device: &dyn BlockDevice,
    survey: &SlotSurvey,
    scanned: &[(u64, ScannedSlot)],
    ino: u64,
) -> Result<Option<Vec<DumpTable>>, StoreError> {
    let about = |identity: &SlotHeader, slot: &ScannedSlot| {
        let lists = matches!(slot, ScannedSlot::Whole(_, list) if list.contains(&ino));
        identity.ino == ino || identity.kind == SlotKind::Removals && lists
    };
    let rows: Vec<Vec<DumpCell>> = scanned
        .iter()
        .flat_map(|(block, slot)| identities(slot).map(move |identity| (*block, slot, identity)))
        .filter(|(_, slot, identity)| about(identity, slot))
        .map(|(block, slot, identity)| {
            let state = state(survey, block, slot);
            let SlotHeader { stamp, group, index, count, body_len, .. } = *identity;
            row![block, state, stamp, group, index, count, body_len]
        })
        .collect();
    if rows.is_empty() {
        return Ok(None);
    }
    let columns: &[&str] = &["block", "state", "stamp", "group", "index", "of", "bytes"];
    let mut tables = vec![DumpTable { name: "slots", columns, rows }];
    let mut line = BlockingQueue::new(device).map_err(device_error("open a queue"))?;
    let version = survey.found.live.get(&ino);
    let body = version.and_then(|version| survey.read(&mut line, version.block));
    if let Some(decoded) = body.as_deref().and_then(DiskInode::decode) {
        tables.extend(contents(device, survey, decoded)?);
    }
    Ok(Some(tables))
}

/// Attributes, names and extents.
fn contents(
    device: &dyn BlockDevice,
    survey: &SlotSurvey,
    decoded: DecodedBody,
) -> Result<Vec<DumpTable>, StoreError> {
    let mut line = BlockingQueue::new(device).map_err(device_error("open a queue"))?;
    let mut seen = HashSet::new();
    let blocks = survey.superblock.blocks;
    let inode = match decoded {
        DecodedBody::Whole(inode) => inode,
        DecodedBody::Outside { inode, levels, bytes, pointers } => {
            let claim =
                &mut |run: crate::space::BlockRun| run.block < blocks && seen.insert(run.block);
            let spilled = load::records(&mut line, claim, (levels, bytes), pointers);
            inode.with_readable_records(&spilled.bytes)
        }
    };
    let mut seen: Vec<u64> = seen.into_iter().collect();
    seen.sort_unstable();
    let attributes = vec![
        row!["mode", format!("{:o}", inode.mode)],
        row!["user", inode.uid],
        row!["group", inode.gid],
        row!["size", inode.size],
        row!["device", inode.rdev],
        row!["modified", format!("{}.{:09}", inode.mtime.sec, inode.mtime.nsec)],
        row!["changed", format!("{}.{:09}", inode.ctime.sec, inode.ctime.nsec)],
        row!["born", format!("{}.{:09}", inode.btime.sec, inode.btime.nsec)],
    ];
    let names = inode.links.iter();
    let names = names.map(|link| row![link.parent, link.stamp, escape_controls(&link.name)]);
    let xattrs = inode.xattrs.iter().map(|(name, value)| row![escape_controls(name), value.len()]);
    let attributes = DumpTable { name: "inode", columns: &["field", "value"], rows: attributes };
    Ok(vec![
        attributes,
        DumpTable {
            name: "names",
            columns: &["directory", "stamp", "name"],
            rows: names.collect(),
        },
        DumpTable { name: "attributes", columns: &["name", "bytes"], rows: xattrs.collect() },
        data(&inode.data),
        DumpTable {
            name: "record_blocks",
            columns: &["block"],
            rows: seen.into_iter().map(|block| row![block]).collect(),
        },
    ])
}

fn data(data: &InodeData) -> DumpTable {
    let columns: &[&str] = &["page", "block", "blocks", "state"];
    let rows = match data {
        InodeData::Nothing => Vec::new(),
        InodeData::Inline(bytes) => {
            vec![row![0_u64, "", "", format!("{} bytes inline", bytes.len())]]
        }
        InodeData::Target(target) => {
            vec![row![0_u64, "", "", format!("link to {}", escape_controls(target))]]
        }
        InodeData::Extents(extents) => extents
            .iter()
            .map(|extent| {
                let state = if extent.unwritten { "unwritten" } else { "written" };
                row![extent.page, extent.block, extent.count, state]
            })
            .collect(),
    };
    DumpTable { name: "data", columns, rows }
}

/// Bytes as text without control characters.
fn escape_controls(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}
