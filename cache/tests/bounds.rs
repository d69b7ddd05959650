//! Rules that all policies keep, for all sequences of uses.

use std::collections::HashMap;

use defuse_cache::e::{CHOICES, SAMPLE};
use defuse_cache::{ExtentKey, ExtentUse, OwnerShares, PolicyKind, QueueE, ReplacementPolicy};
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
enum PolicyStep {
    Use(u64, u32),
    Remove(u64),
    /// Evicts an extent with an even number.
    EvictEven,
}

fn make_steps() -> impl Strategy<Value = Vec<PolicyStep>> {
    let step = prop_oneof![
        8 => (0..200_u64, 0..100_u32).prop_map(|(key, user)| PolicyStep::Use(key, user)),
        1 => (0..200_u64).prop_map(PolicyStep::Remove),
        1 => Just(PolicyStep::EvictEven),
    ];
    proptest::collection::vec(step, 1..400)
}

/// Sizes of 0 to 60 bytes, which depend on the key; those above the capacity never enter.
fn extent(key: u64, user: u32) -> ExtentUse {
    ExtentUse { key: ExtentKey::new(key % 3, key), size: key * 7 % 61, user }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_cache_holds_what_came_and_did_not_leave_and_never_more_than_its_capacity(
        steps in make_steps(),
        capacity in 1..400_u64,
    ) {
        for (name, kind) in PolicyKind::ALL {
            let mut policy = kind.make(capacity, 7);
            let mut there: HashMap<ExtentKey, u64> = HashMap::new();
            for &step in &steps {
                let mut evicted = Vec::new();
                match step {
                    PolicyStep::Use(key, user) => {
                        let one = extent(key, user);
                        let hit = policy.access(one, &mut evicted);
                        prop_assert_eq!(hit, there.contains_key(&one.key), "{}", name);
                        if (1..=capacity).contains(&one.size) {
                            there.insert(one.key, one.size);
                        }
                    }
                    PolicyStep::Remove(key) => {
                        let key = extent(key, 0).key;
                        prop_assert_eq!(policy.remove(key), there.remove(&key).is_some());
                    }
                    PolicyStep::EvictEven => {
                        evicted.extend(policy.evict(&|key| key.index % 2 == 0));
                        prop_assert!(evicted.iter().all(|key| key.index % 2 == 0), "{}", name);
                    }
                }
                for key in evicted {
                    prop_assert!(there.remove(&key).is_some(), "{} evicts what is not there", name);
                }
                prop_assert_eq!(policy.bytes(), there.values().sum::<u64>(), "{}", name);
                prop_assert!(policy.bytes() <= capacity);
                prop_assert!(there.keys().all(|&key| policy.contains(key)));
            }
        }
    }

    #[test]
    fn no_owner_loses_extents_to_others_while_it_has_no_more_than_its_part(
        steps in proptest::collection::vec((0..4_u32, 0..60_u64), 1..500),
    ) {
        const CAPACITY: u64 = 40;
        for (name, kind) in PolicyKind::ALL {
            let mut shares = OwnerShares::new(kind.make(CAPACITY, 7));
            let mut charged: HashMap<ExtentKey, u32> = HashMap::new();
            for &(owner, index) in &steps {
                // Keys of different owners overlap in part.
                let key = ExtentKey::new(u64::from(owner) / 2, index);
                let mut evicted = Vec::new();
                shares.access(ExtentUse { key, size: 1, user: owner }, owner, &mut evicted);
                for gone in evicted {
                    let whose = charged.remove(&gone).unwrap();
                    let count = (0..4).filter(|&one| {
                        one == owner || charged.values().any(|&other| other == one) || one == whose
                    }).count() as u64;
                    let left = charged.values().filter(|&&other| other == whose).count() as u64;
                    prop_assert!(
                        whose == owner || left + 1 > CAPACITY / count,
                        "{}: {} lost an extent and has {}", name, whose, left
                    );
                }
                charged.entry(key).or_insert(owner);
                for one in 0..4 {
                    let bytes = charged.values().filter(|&&other| other == one).count() as u64;
                    prop_assert_eq!(bytes, shares.bytes_of(one));
                }
                prop_assert!(shares.policy().bytes() <= CAPACITY);
            }
        }
    }
}

/// A user that reads ever new extents, each several times by many processes, would otherwise own
/// the cache.
#[test]
fn a_flood_by_one_owner_displaces_nothing_that_two_others_use() {
    for (name, kind) in PolicyKind::ALL {
        let mut shares = OwnerShares::new(kind.make(300, 7));
        let mut evicted = Vec::new();
        let mut access = |owner: u32, user: u32, key: ExtentKey| {
            shares.access(ExtentUse { key, size: 1, user }, owner, &mut evicted)
        };
        // Charged to owners 1 and 2, 75 each: less than their parts.
        for index in 0..150 {
            access(1 + (index % 2) as u32, index as u32 % 2, ExtentKey::new(0, index));
        }
        for flood in 0..3000 {
            for user in 2..34 {
                access(3, user, ExtentKey::new(1, flood));
            }
        }
        let kept = (0..150).filter(|&index| access(1, 0, ExtentKey::new(0, index))).count();
        assert_eq!(kept, 150, "{name}");
    }
}

#[test]
fn a_policy_remembers_a_bounded_number_of_keys() {
    for (name, kind) in PolicyKind::ALL {
        let mut policy = kind.make(1000, 7);
        let mut evicted = Vec::new();
        for number in 0..60_000_u64 {
            let key = ExtentKey::new(number % 7, number);
            policy.access(ExtentUse { key, size: 1, user: number as u32 }, &mut evicted);
            if number % 5 == 0 {
                policy.access(ExtentUse { key, size: 1, user: 0 }, &mut evicted);
            }
        }
        // Four keys that have left for each extent, and the miniatures, whose size varies with the
        // sample.
        let miniatures = CHOICES.len() as u64 * SAMPLE * 5 * 2;
        let most = if kind == PolicyKind::E { 5 * 1000 + miniatures } else { 2 * 1000 };
        assert!(policy.tracked_extents() as u64 <= most, "{name}: {}", policy.tracked_extents());
    }
}

#[test]
fn e_learns_that_recency_misleads_in_a_loop_and_leads_elsewhere() {
    let mut policy = QueueE::new(1000, 7);
    let mut evicted = Vec::new();
    let mut hits = 0;
    for _ in 0..40 {
        for index in 0..1500 {
            let extent = ExtentUse { key: ExtentKey::new(0, index), size: 1, user: 0 };
            hits += u64::from(policy.access(extent, &mut evicted));
        }
    }
    assert!(policy.weights().alpha < 0.0, "{:?}", policy.weights());
    assert!(hits > 40 * 1500 / 2, "LRU has none: {hits}");
    // Files that are used four times and never again.
    for file in 1..400 {
        for index in (0..4).flat_map(|_| 0..200) {
            let extent = ExtentUse { key: ExtentKey::new(file, index), size: 1, user: 0 };
            policy.access(extent, &mut evicted);
        }
    }
    assert!(policy.weights().alpha > 0.0, "{:?}", policy.weights());
}

#[test]
fn a_policy_is_found_by_its_name_and_an_unknown_name_gets_the_list() {
    for (name, kind) in PolicyKind::ALL {
        assert_eq!((PolicyKind::from_name(name), kind.name()), (Ok(kind), name));
    }
    let error = PolicyKind::from_name("mru").unwrap_err();
    assert_eq!(
        error,
        "there is no policy \"mru\": write one of lru, lfu, arc, s3-fifo, plain-e, e"
    );
}
