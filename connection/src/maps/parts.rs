//! Parts of files: ranges of bytes, in order and apart from each other.

use std::ops::Range;

pub(super) const PAGE: u64 = 4096;
/// The number of bytes that are moved at once.
pub(super) const PIECE: usize = 128 * 1024;

/// The whole pages around `range`.
pub(super) fn pages(range: &Range<u64>) -> Range<u64> {
    let end = range.end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX / PAGE * PAGE);
    range.start / PAGE * PAGE..end
}

/// The part that comes first.
pub(super) fn first_part(one: Option<Range<u64>>, other: Option<Range<u64>>) -> Option<Range<u64>> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if one.start <= other.start { one } else { other }),
        (one, other) => one.or(other),
    }
}

pub(super) fn pieces(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let step = PIECE as u64;
    let mut at = range.start;
    std::iter::from_fn(move || {
        let part = at..range.end.min(at.saturating_add(step));
        at = part.end;
        (part.start < part.end).then_some(part)
    })
}

pub(super) fn common(a: &Range<u64>, b: &Range<u64>) -> Option<Range<u64>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (both.start < both.end).then_some(both)
}

/// The rest of `range` that is in none of `parts`.
pub(super) fn subtract(range: &Range<u64>, parts: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut missing = Vec::new();
    let mut at = range.start;
    for part in parts.iter().filter_map(|part| common(part, range)) {
        if at < part.start {
            missing.push(at..part.start);
        }
        at = part.end;
    }
    if at < range.end {
        missing.push(at..range.end);
    }
    missing
}

/// Adds `part`, which is in none of `parts`.
pub(super) fn add(parts: &mut Vec<Range<u64>>, part: Range<u64>) {
    let place = parts.partition_point(|other| other.start < part.start);
    parts.insert(place, part);
    parts.dedup_by(|next, before| {
        let touches = before.end == next.start;
        if touches {
            before.end = next.end;
        }
        touches
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_filled_once_and_grow_together() {
        let mut parts = Vec::new();
        for part in [8..16, 32..40, 0..4] {
            add(&mut parts, part);
        }
        assert_eq!(subtract(&(2..36), &parts), [4..8, 16..32]);
        add(&mut parts, 4..8);
        add(&mut parts, 16..32);
        assert_eq!((parts.len(), &parts[0]), (1, &(0..40)));
        assert_eq!(subtract(&(0..40), &parts), []);
        assert_eq!(subtract(&(39..50), &parts).first(), Some(&(40..50)));
        assert_eq!(common(&(0..4), &(4..8)), None);
        assert_eq!(pieces(0..PIECE as u64 + 1).last(), Some(PIECE as u64..PIECE as u64 + 1));
    }
}
