//! `defuse top`: all FUSE connections of the machine and all servers, live.
//!
//! `model.rs` and `servers.rs` sample, `plain.rs` prints for scripts, `view.rs` draws, `cast.rs`
//! records what it draws, and this file is the loop around them.

mod cast;
mod model;
mod plain;
mod servers;
mod view;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use defuse_trace::CollectorOptions;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::error::{CommandFailure, Result, print};
use crate::kernel::KernelArgs;
use crate::stat::period;
use crate::until::StopCondition;
use cast::CastRecorder;
use model::{SortOrder, TopModel};
use view::TopView;

/// Time to wait for a key between two checks for signals.
const LOOK: Duration = Duration::from_millis(50);

/// Show all FUSE file systems of the machine and all servers, live
///
/// Traces the kernel, which needs root. Servers (serve, manager) answer their user, too. Keys:
/// arrows select, Enter shows the operations of a connection or a server, and the clients of a
/// server, o p w c n sort, space pauses, q quits.
#[derive(clap::Args)]
pub struct TopArgs {
    /// Seconds between two samples
    #[arg(long, value_name = "SECS", value_parser = period, default_value = "1")]
    every: Duration,
    /// The order of connections and servers
    #[arg(long, value_enum, default_value_t = SortOrder::Ops)]
    sort: SortOrder,
    /// Print text once, after one period, and exit
    #[arg(long, conflicts_with = "batch")]
    once: bool,
    /// Print text after every period
    #[arg(long)]
    batch: bool,
    /// Record the view in this new file, in the format of asciinema, until --for or a signal ends
    /// it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["once", "batch", "json"])]
    cast: Option<PathBuf>,
    /// Print JSON after every period, one object per line
    #[arg(long)]
    json: bool,
    /// Exit after this many seconds
    #[arg(long = "for", value_name = "SECS", value_parser = period)]
    duration: Option<Duration>,
    #[command(flatten)]
    kernel: KernelArgs,
}

/// Shows the connections until a key or a signal ends it.
pub fn run(args: &TopArgs) -> Result {
    let plain = args.once || args.batch || args.json;
    if !plain && args.cast.is_none() && !std::io::stdout().is_terminal() {
        return Err(CommandFailure::Usage(
            "the standard output is no terminal: use --once, --batch, --json or --cast".into(),
        ));
    }
    let mut model = TopModel::start(args.kernel.start(CollectorOptions::default()), args.sort)?;
    let until = StopCondition::new(args.duration)?;
    match &args.cast {
        Some(file) => record(args, file, &mut model, &until),
        None if plain => print_all(args, &mut model, &until),
        None => draw_all(args, &mut model, &until),
    }
}

/// Records the view of each sample.
fn record(args: &TopArgs, file: &Path, model: &mut TopModel, until: &StopCondition) -> Result {
    let failed =
        |error: std::io::Error| CommandFailure::Failed(format!("{}: {error}", file.display()));
    let mut recorder = CastRecorder::create(file).map_err(failed)?;
    let mut view = TopView::default();
    while until.sleep(args.every) {
        model.look()?;
        recorder.draw(|frame| view.draw(frame, model)).map_err(failed)?;
    }
    Ok(())
}

fn print_all(args: &TopArgs, model: &mut TopModel, until: &StopCondition) -> Result {
    while until.sleep(args.every) {
        model.look()?;
        print(&if args.json { plain::json(model)? } else { plain::text(model) })?;
        if args.once {
            break;
        }
    }
    Ok(())
}

fn draw_all(args: &TopArgs, model: &mut TopModel, until: &StopCondition) -> Result {
    let failed = |error: std::io::Error| CommandFailure::Failed(format!("the terminal: {error}"));
    // The terminal is restored by the hook of a panic, too.
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let mut outcome = Ok(());
    let mut view = TopView::default();
    let mut next = Instant::now() + args.every;
    let mut is_stale = true;
    while outcome.is_ok() && !until.is_over() && !view.quit {
        if std::mem::take(&mut is_stale) {
            outcome = terminal.draw(|frame| view.draw(frame, model)).map(drop).map_err(failed);
        }
        let wait = next.saturating_duration_since(Instant::now()).min(LOOK);
        match event::poll(wait).and_then(|is_there| is_there.then(event::read).transpose()) {
            Ok(Some(event)) => {
                react(&event, &mut view, model);
                is_stale = true;
            }
            Ok(None) => {}
            // A signal; the loop sees which.
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => outcome = outcome.and(Err(failed(error))),
        }
        if Instant::now() >= next {
            next = Instant::now() + args.every;
            is_stale = true;
            if !view.held {
                outcome = outcome.and_then(|()| model.look());
            }
        }
    }
    // If the terminal cannot be restored, a message could not be shown either.
    let _ = ratatui::try_restore();
    outcome
}

fn react(event: &Event, view: &mut TopView, model: &mut TopModel) {
    let Event::Key(key) = event else { return };
    if key.kind == KeyEventKind::Release {
        return;
    }
    let rows = model.rows.len() + model.servers.len();
    match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => view.quit = true,
        KeyCode::Char('q') => view.quit = true,
        KeyCode::Esc if view.detail => view.detail = false,
        KeyCode::Esc => view.quit = true,
        KeyCode::Enter => view.detail = !view.detail && rows > 0,
        KeyCode::Up | KeyCode::Char('k') => view.selected = view.selected.saturating_sub(1),
        KeyCode::Down | KeyCode::Char('j') => {
            view.selected = (view.selected + 1).min(rows.saturating_sub(1));
        }
        KeyCode::Char(' ') => view.held = !view.held,
        KeyCode::Char(letter) => {
            if let Some(sort) = SortOrder::from_key(letter) {
                model.sort_by(sort);
            }
        }
        _ => {}
    }
}
