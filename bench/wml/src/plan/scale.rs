//! Scales a workload by a factor, and checks sizes that depend on each other.

use super::{FilesetPlan, FlowopKind, FlowopPlan, PlanNumber, WorkloadAction, WorkloadPlan};
use crate::lang::SourcePosition;
use crate::lang::diagnostic::LanguageError;
use crate::random::{RandomAmount, RandomVariable};
use std::sync::Arc;

/// Files of at least this size are scaled in size; the number of smaller ones is scaled.
const LARGE_FILE: f64 = (1 << 20) as f64;

/// The changes by scaling, for reports.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct PlanScaling {
    /// The requested factor.
    pub factor: f64,
    /// A description of each change.
    pub changes: Vec<String>,
}

/// The proportion of memory to data in an experiment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryShare {
    /// Memory of the machine, in bytes.
    pub memory: u64,
    /// Data of the workload, in bytes.
    pub data: u64,
}

impl MemoryShare {
    /// 4 GB of memory for 60 GB of data (*To FUSE or Not to FUSE*, FAST '17, section 4).
    pub const PAPER: MemoryShare = MemoryShare { memory: 4 << 30, data: 60 << 30 };

    /// The smallest limit: a smaller memory cgroup cannot hold the threads and their buffers.
    pub const LEAST: u64 = 16 << 20;

    /// The memory for `data` bytes in the same proportion: whole pages, and at least
    /// [`MemoryShare::LEAST`].
    pub fn limit_for(self, data: u64) -> u64 {
        let limit = u128::from(data) * u128::from(self.memory) / u128::from(self.data.max(1));
        let limit = u64::try_from(limit).unwrap_or(u64::MAX) & !4095;
        limit.max(Self::LEAST)
    }
}

/// Scales `plan` by `factor`, and checks sizes that depend on each other.
pub(super) fn apply(plan: &mut WorkloadPlan, factor: f64) -> Result<(), LanguageError> {
    if !(factor.is_finite() && factor > 0.0) {
        let found = format!("the scale {factor}");
        return Err(LanguageError::new(
            SourcePosition::default(),
            found,
            "a factor above 0, such as 0.001",
        ));
    }
    check_sizes(plan)?;
    plan.scaling.factor = factor;
    if factor == 1.0 {
        return Ok(());
    }
    let uses: Vec<FilesetUse> = (0..plan.filesets.len()).map(|set| usage(plan, set)).collect();
    let mut ratios = Vec::new();
    for (set, usage) in plan.filesets.iter_mut().zip(&uses) {
        ratios.push(scale_set(set, usage, factor, &mut plan.scaling.changes));
    }
    let WorkloadPlan { actions, scaling, .. } = plan;
    for action in actions {
        let WorkloadAction::Run(run) = action else { continue };
        for thread in &mut run.threads {
            let opened = list_opened_sets(&thread.flowops);
            scale_steps(&mut thread.flowops, &opened, &ratios, factor, &mut scaling.changes);
        }
    }
    Ok(())
}

/// The use of a file set by flowops.
#[derive(Default)]
struct FilesetUse {
    threads: u64,
    largest_io: u64,
}

fn visit_steps(steps: &[FlowopPlan], visit: &mut dyn FnMut(&FlowopPlan)) {
    for step in steps {
        visit(step);
        if let FlowopKind::Composite(inner) = &step.kind {
            visit_steps(inner, visit);
        }
    }
}

/// The file set of each open descriptor of a thread.
fn list_opened_sets(steps: &[FlowopPlan]) -> Vec<(usize, usize)> {
    let mut opened = Vec::new();
    visit_steps(steps, &mut |step| {
        if let Some(set) = step.fileset {
            opened.push((step.fd, set));
        }
    });
    opened
}

/// The file set that `step` uses.
fn set_of(step: &FlowopPlan, opened: &[(usize, usize)]) -> Option<usize> {
    step.fileset.or_else(|| opened.iter().find(|(fd, _)| *fd == step.fd).map(|(_, set)| *set))
}

fn usage(plan: &WorkloadPlan, set: usize) -> FilesetUse {
    let mut found = FilesetUse::default();
    for action in &plan.actions {
        let WorkloadAction::Run(run) = action else { continue };
        for thread in &run.threads {
            let opened = list_opened_sets(&thread.flowops);
            let mut uses_it = false;
            visit_steps(&thread.flowops, &mut |step| {
                if set_of(step, &opened) == Some(set) {
                    uses_it = true;
                    if let (PlanNumber::Fixed(size), FlowopKind::Read | FlowopKind::Write) =
                        (step.iosize, &step.kind)
                    {
                        found.largest_io = found.largest_io.max(size);
                    }
                }
            });
            found.threads += if uses_it { thread.instances } else { 0 };
        }
    }
    found
}

/// Scales one set. Returns the factor by which its file size has changed.
fn scale_set(
    set: &mut FilesetPlan,
    usage: &FilesetUse,
    factor: f64,
    changes: &mut Vec<String>,
) -> f64 {
    if set.size.mean() >= LARGE_FILE {
        return scale_size(set, usage.largest_io.max(4096), factor, changes);
    }
    // Two files per thread, both of the existing and of the absent ones.
    let share = match set.prealloc.unwrap_or(0) {
        0 | 100 => 1.0,
        percent => (percent.min(100 - percent) as f64) / 100.0,
    };
    let least = ((2 * usage.threads) as f64 / share).ceil().max(1.0) as u64;
    let scaled = ((set.entries as f64 * factor).round() as u64).max(least);
    // A small number is not increased by a factor below 1.
    let entries = if factor < 1.0 { scaled.min(set.entries) } else { scaled };
    if entries != set.entries {
        changes.push(format!("{}: {} files instead of {}", set.name, entries, set.entries));
        set.entries = entries;
    }
    if set.leafdirs > 0 {
        set.leafdirs = ((set.leafdirs as f64 * factor).round() as u64).max(1);
    }
    1.0
}

fn scale_size(set: &mut FilesetPlan, unit: u64, factor: f64, changes: &mut Vec<String>) -> f64 {
    let before = set.size.mean();
    set.size = match &set.size {
        RandomAmount::Fixed(size) => {
            // A multiple of the I/O size, so that a pass over the file has no short I/O at its end.
            let units = ((*size as f64 * factor / unit as f64).round() as u64).max(1);
            RandomAmount::Fixed(units * unit)
        }
        RandomAmount::Random(variable) => RandomAmount::Random(Arc::new(RandomVariable {
            factor: variable.factor * factor,
            ..RandomVariable::clone(variable)
        })),
    };
    let after = set.size.mean();
    changes.push(format!("{}: files of {after:.0} bytes instead of {before:.0}", set.name));
    after / before
}

/// Scales finish conditions by the factor, and the repetitions of reads and writes by the change of
/// the file size.
fn scale_steps(
    steps: &mut [FlowopPlan],
    opened: &[(usize, usize)],
    ratios: &[f64],
    factor: f64,
    changes: &mut Vec<String>,
) {
    for step in steps {
        let set = set_of(step, opened);
        let FlowopPlan { kind, name, value, iters, workingset, .. } = step;
        match kind {
            FlowopKind::Composite(inner) => scale_steps(inner, opened, ratios, factor, changes),
            FlowopKind::FinishOnCount | FlowopKind::FinishOnBytes => {
                scale_number(value, factor, &format!("{name}: ends at"), changes);
            }
            FlowopKind::Read | FlowopKind::Write => {
                let ratio = set.map_or(1.0, |set| ratios[set]);
                scale_number(iters, ratio, &format!("{name}: iters"), changes);
                if *workingset > 0 {
                    *workingset = ((*workingset as f64 * ratio) as u64).max(1);
                }
            }
            _ => {}
        }
    }
}

fn scale_number(number: &mut PlanNumber, factor: f64, what: &str, changes: &mut Vec<String>) {
    let PlanNumber::Fixed(before) = *number else { return };
    let after = ((before as f64 * factor).round() as u64).max(before.min(1));
    if after != before {
        changes.push(format!("{what} {after} instead of {before}"));
        *number = PlanNumber::Fixed(after);
    }
}

/// Refuses sizes that contradict each other.
fn check_sizes(plan: &WorkloadPlan) -> Result<(), LanguageError> {
    let mut wrong = None;
    for action in &plan.actions {
        let WorkloadAction::Run(run) = action else { continue };
        for thread in &run.threads {
            let opened = list_opened_sets(&thread.flowops);
            visit_steps(&thread.flowops, &mut |step| {
                let set = set_of(step, &opened).map(|set| &plan.filesets[set]);
                let found = set.and_then(|set| find_mismatch(step, set, thread.memsize));
                wrong = wrong.take().or(found);
            });
        }
    }
    wrong.map_or(Ok(()), Err)
}

fn find_mismatch(step: &FlowopPlan, set: &FilesetPlan, memsize: u64) -> Option<LanguageError> {
    let PlanNumber::Fixed(iosize) = step.iosize else { return None };
    let place = SourcePosition { line: step.line, column: 1 };
    if memsize > 0 && iosize > memsize && (step.kind.reads() || step.kind.writes()) {
        let found = format!("iosize of `{}` is {iosize}", step.name);
        return Some(LanguageError::new(
            place,
            found,
            format!("at most memsize, which is {memsize}"),
        ));
    }
    let file = match step.workingset {
        0 if set.size_gamma == 0.0 => set.size.fixed_value()?,
        0 => return None,
        bytes => bytes,
    };
    if step.random && iosize > file && matches!(step.kind, FlowopKind::Read | FlowopKind::Write) {
        let found = format!("iosize of `{}` is {iosize}", step.name);
        let expected = format!("at most the size of a file of `{}`, which is {file}", set.name);
        return Some(LanguageError::new(place, found, expected));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_keeps_the_proportion_of_the_paper() {
        assert_eq!(MemoryShare::PAPER.limit_for(60 << 30), 4 << 30);
        assert_eq!(MemoryShare::PAPER.limit_for(600 << 20), 40 << 20);
        assert_eq!(MemoryShare::PAPER.limit_for(0), MemoryShare::LEAST);
        assert_eq!(MemoryShare::PAPER.limit_for(u64::MAX) % 4096, 0);
    }
}
