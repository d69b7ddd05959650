//! The rounds, in a process in the name spaces of the servers: measures every case on every target
//! in turn.

use std::io::Read;
use std::path::Path;
use std::{fs, thread};

use anyhow::{Context, Result, ensure};
use defuse_measure::gluster::ROOM;

use super::GlusterStudyOptions;
use super::cases::VolumeKind;
use super::results::GlusterResults;
use super::stage::VolumeTargets;
use crate::interrupt::InterruptFlag;

/// Measures everything, and adds it to `results`. `tell` receives lines of progress. The end of the
/// standard input is a request to end: the cases that were measured by then remain.
///
/// # Errors
///
/// Fails if no target can be started, or if the files of a volume cannot be made.
pub fn rounds(
    options: &GlusterStudyOptions,
    mut results: GlusterResults,
    tell: &mut dyn FnMut(&str),
) -> Result<GlusterResults> {
    let interrupt = InterruptFlag::catch()?;
    let ended = interrupt.clone();
    thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ended.set();
    });
    for &place in &options.choice.places {
        if interrupt.is_set() {
            break;
        }
        volume(options, place, &mut results, &interrupt, tell)?;
    }
    results.interrupted = interrupt.is_set();
    ensure!(!results.cells.is_empty(), "nothing was measured: {}", results.left_out.join("; "));
    Ok(results)
}

/// Measures all rounds on a volume.
fn volume(
    options: &GlusterStudyOptions,
    place: VolumeKind,
    results: &mut GlusterResults,
    interrupt: &InterruptFlag,
    tell: &mut dyn FnMut(&str),
) -> Result<()> {
    let cases = options.choice.cases(place);
    if cases.is_empty() {
        return Ok(());
    }
    let work = Path::new(ROOM).join(format!("bench-{}", place.name()));
    fs::create_dir(&work).with_context(|| work.display().to_string())?;
    let (mut stage, mut left_out) = VolumeTargets::set(options, place, &work, &cases)?;
    for target in &stage.targets {
        if cases.iter().any(|case| !target.can(*case)) {
            let name = &target.name;
            left_out.push(format!("{name} on {}: libaio: a run refuses io_setup(2)", place.name()));
        }
    }
    for reason in left_out {
        tell(&format!("left out: {reason}"));
        results.left_out.push(reason);
    }
    let count = stage.targets.len();
    for round in 1..=options.rounds {
        for &case in &cases {
            let mut line = format!("{} round {round} {:28}", place.name(), case.name());
            for turn in 0..count {
                // Over the rounds, every target has every place in the order.
                let index = (turn + round as usize) % count;
                if !stage.targets[index].can(case) {
                    continue;
                }
                let cell = stage.measure(case, index, round, interrupt);
                if interrupt.is_set() {
                    return Ok(());
                }
                line.push_str(&match &cell.error {
                    None => format!("  {} {:.0}", cell.target, cell.rate()),
                    Some(error) => format!("  {} FAILED: {error}", cell.target),
                });
                results.cells.push(cell);
            }
            tell(&line);
        }
    }
    Ok(())
}
