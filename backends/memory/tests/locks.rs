//! Compares the lock manager with a model that stores the lock of every byte of a small file.

use defuse_fs::locks::{LockRequestOutcome, LockTable, OFFSET_MAX};
use defuse_fs::{Errno, Lock, LockKind, LockOwner, LockRequest, LockType};
use proptest::prelude::*;

const OWNERS: usize = 3;
const BYTES: usize = 12;
const FILE: u8 = 1;

/// The lock of every owner on every byte. The last byte stands for all that follow.
type LockModel = [[Option<LockType>; BYTES]; OWNERS];

#[derive(Clone, Copy, Debug)]
struct LockStep {
    owner: usize,
    typ: LockType,
    start: usize,
    end: usize,
    wait: bool,
}

fn step() -> impl Strategy<Value = LockStep> {
    let typ = prop_oneof![Just(LockType::Read), Just(LockType::Write), Just(LockType::Unlock)];
    (0..OWNERS, typ, 0..BYTES, 0..BYTES, any::<bool>()).prop_map(|(owner, typ, a, b, wait)| {
        LockStep { owner, typ, start: a.min(b), end: a.max(b), wait }
    })
}

fn request(step: &LockStep) -> LockRequest {
    let end = if step.end == BYTES - 1 { OFFSET_MAX } else { step.end as u64 };
    let lock = Lock { typ: step.typ, start: step.start as u64, end, pid: step.owner as u32 };
    let owner = LockOwner(step.owner as u64);
    LockRequest { kind: LockKind::Posix, owner, lock, wait: step.wait }
}

fn conflicts(model: &LockModel, step: &LockStep) -> bool {
    let others = (0..OWNERS).filter(|&other| other != step.owner);
    let mut held = others.flat_map(|other| model[other][step.start..=step.end].iter().flatten());
    match step.typ {
        LockType::Unlock => false,
        LockType::Read => held.any(|&typ| typ == LockType::Write),
        LockType::Write => held.next().is_some(),
    }
}

fn apply(model: &mut LockModel, step: &LockStep) {
    let typ = (step.typ != LockType::Unlock).then_some(step.typ);
    model[step.owner][step.start..=step.end].fill(typ);
}

/// Number of locks of an owner, where adjacent locks of one type count as one.
fn count_runs(bytes: &[Option<LockType>; BYTES]) -> usize {
    let first = usize::from(bytes[0].is_some());
    first + bytes.windows(2).filter(|pair| pair[1].is_some() && pair[0] != pair[1]).count()
}

/// True if `owner` would wait for itself through the queued waits.
fn circle(model: &LockModel, waiting: &[LockStep], step: &LockStep) -> bool {
    let blockers = |step: &LockStep| -> Vec<usize> {
        let blocks = |other: &usize| {
            let mut alone = [[None; BYTES]; OWNERS];
            alone[*other] = model[*other];
            *other != step.owner && conflicts(&alone, step)
        };
        (0..OWNERS).filter(blocks).collect()
    };
    let mut reached = blockers(step);
    // After as many rounds as there are owners, every reachable owner is reached.
    for _ in 0..OWNERS {
        for wait in waiting {
            if reached.contains(&wait.owner) {
                reached.extend(blockers(wait));
            }
        }
    }
    reached.contains(&step.owner)
}

/// Grants waits in the order of arrival, as the table promises, and returns them.
fn grant(model: &mut LockModel, waiting: &mut Vec<LockStep>) -> Vec<usize> {
    let mut granted = Vec::new();
    while let Some(at) = waiting.iter().position(|wait| !conflicts(model, wait)) {
        let wait = waiting.remove(at);
        apply(model, &wait);
        granted.push(wait.owner);
    }
    granted
}

fn run(steps: &[LockStep]) -> Result<(), TestCaseError> {
    let mut table = LockTable::<u8, usize>::default();
    let mut model: LockModel = [[None; BYTES]; OWNERS];
    let mut waiting: Vec<LockStep> = Vec::new();
    for step in steps {
        // Ended waits are identified by their owner, so each owner has at most one.
        let busy = waiting.iter().any(|wait| wait.owner == step.owner);
        let mut granted = Vec::new();
        let free = !conflicts(&model, step);
        if free {
            apply(&mut model, step);
        }
        if step.wait && !busy {
            let deadlock = !free && circle(&model, &waiting, step);
            match table.wait((FILE, 0), &request(step), step.owner, &mut granted) {
                LockRequestOutcome::Done(_, Ok(())) => prop_assert!(free, "{step:?} was granted"),
                LockRequestOutcome::Done(_, Err(Errno::EDEADLK)) => {
                    prop_assert!(deadlock, "{step:?}")
                }
                LockRequestOutcome::Done(_, other) => {
                    prop_assert!(false, "{step:?} gave {other:?}")
                }
                LockRequestOutcome::Queued(_) => {
                    prop_assert!(!free && !deadlock, "{step:?} waits");
                    waiting.push(*step);
                }
            }
        } else {
            let result = table.set(FILE, &request(step), &mut granted);
            let wanted = if free { Ok(()) } else { Err(Errno::EAGAIN) };
            prop_assert_eq!(result, wanted, "{:?}", step);
        }
        prop_assert_eq!(granted, grant(&mut model, &mut waiting), "after {:?}", step);
        prop_assert_eq!(
            table.held_count(),
            model.iter().map(count_runs).sum::<usize>(),
            "{:?}",
            step
        );
        check_bytes(&table, &model)?;
    }
    Ok(())
}

fn check_bytes(table: &LockTable<u8, usize>, model: &LockModel) -> Result<(), TestCaseError> {
    for byte in 0..BYTES {
        for typ in [LockType::Read, LockType::Write] {
            // An owner without locks conflicts with every lock.
            let stranger = LockStep { owner: OWNERS, typ, start: byte, end: byte, wait: false };
            let seen = table.conflict(FILE, &request(&stranger)).expect("a valid range");
            prop_assert_eq!(seen.is_some(), conflicts(model, &stranger), "byte {}", byte);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_is_locked_as_the_model_says(steps in prop::collection::vec(step(), 1..60)) {
        run(&steps)?;
    }
}
