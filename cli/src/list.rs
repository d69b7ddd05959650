//! `defuse list`.

use std::fmt::Write as _;

use defuse_fuse::mount::fuse_mounts;
use serde::Serialize;

use crate::error::{CommandFailure, Result, print};
use crate::registry::{self, RegistrationState};
use crate::servers::{self, ServerEntry};
use crate::terminal;
use crate::umount::is_ours;

/// List mounts, and servers on sockets
#[derive(clap::Args)]
pub struct ListArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// One mount.
#[derive(Debug, Serialize)]
struct MountRow {
    mountpoint: String,
    source: String,
    /// The state; `unregistered` for a mount without an entry, such as one of another user.
    state: String,
    pid: Option<u32>,
    connection: u32,
    since_unix: Option<u64>,
    version: Option<String>,
    options: Vec<String>,
}

/// An entry of the list.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum ListEntry {
    Mount(MountRow),
    /// A server has `socket` in place of `mountpoint`.
    Server(ServerEntry),
}

/// Prints all mounts and servers.
pub fn run(args: &ListArgs) -> Result {
    let (rows, servers) = (rows(), servers::list_all());
    if args.json {
        let servers = servers.into_iter().map(ListEntry::Server);
        let lines: Vec<ListEntry> = rows.into_iter().map(ListEntry::Mount).chain(servers).collect();
        let text = serde_json::to_string_pretty(&lines).map_err(CommandFailure::from_error)?;
        return print(&format!("{text}\n"));
    }
    let now = registry::now_unix();
    let mut text = table(&rows, now);
    if !servers.is_empty() {
        text += &format!("\n{}", server_table(&servers, now));
    }
    print(&text)
}

fn server_table(servers: &[ServerEntry], now_unix: u64) -> String {
    let shown = |at: &str, source: &str| {
        (terminal::escape_controls(at).into_owned(), terminal::escape_controls(source).into_owned())
    };
    let mut rows = Vec::new();
    for server in servers {
        let end = format!("{:>7}  {}", server.pid, format_age(server.since_unix, now_unix));
        rows.push((shown(&server.socket, &server.source), end));
        // The file systems of a manager, below its socket.
        let devices = server.devices.iter();
        let devices =
            devices.map(|one| (shown(&format!("  {}", one.path), &one.source), String::new()));
        rows.extend(devices);
    }
    let width = |texts: &mut dyn Iterator<Item = usize>| texts.max().unwrap_or(0).max(6);
    let at = width(&mut rows.iter().map(|((at, _), _)| at.chars().count()));
    let what = width(&mut rows.iter().map(|((_, source), _)| source.chars().count()));
    let mut text = format!("{:at$}  {:what$}  {:>7}  SINCE\n", "SOCKET", "SOURCE", "PID");
    for ((socket, source), end) in &rows {
        let row = format!("{socket:at$}  {source:what$}  {end}");
        let _ = writeln!(text, "{}", row.trim_end());
    }
    text
}

fn rows() -> Vec<MountRow> {
    let found = registry::list_all();
    let known = |connection| found.iter().any(|found| found.entry.connection == connection);
    let mounts = fuse_mounts().unwrap_or_default();
    let strangers = mounts.iter().filter(|mount| is_ours(mount) && !known(mount.connection()));
    let strangers = strangers.map(|mount| MountRow {
        mountpoint: mount.mount_point.to_string_lossy().into_owned(),
        source: mount.source.to_string_lossy().into_owned(),
        state: "unregistered".to_owned(),
        pid: None,
        connection: mount.connection(),
        since_unix: None,
        version: None,
        options: Vec::new(),
    });
    let registered = found.iter().map(|found| MountRow {
        mountpoint: found.shown_mountpoint(),
        source: found.entry.source.clone(),
        state: name(found.state).to_owned(),
        pid: Some(found.entry.pid),
        connection: found.entry.connection,
        since_unix: Some(found.entry.since_unix),
        version: Some(found.entry.version.clone()),
        options: found.entry.options.clone(),
    });
    registered.chain(strangers).collect()
}

fn name(state: RegistrationState) -> &'static str {
    match state {
        RegistrationState::Serving => "serving",
        RegistrationState::Detached => "detached",
        RegistrationState::Dead => "dead",
        RegistrationState::Gone => "gone",
    }
}

fn table(rows: &[MountRow], now_unix: u64) -> String {
    let width = |field: fn(&MountRow) -> &str, least: usize| {
        let widths = rows.iter().map(|row| terminal::escape_controls(field(row)).chars().count());
        widths.max().unwrap_or(0).max(least)
    };
    let (at, what) = (width(|row| &row.mountpoint, 10), width(|row| &row.source, 6));
    let mut text =
        format!("{:at$}  {:what$}  {:12}  {:>7}  SINCE\n", "MOUNTPOINT", "SOURCE", "STATE", "PID");
    for row in rows {
        let pid = row.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let since =
            row.since_unix.map_or_else(|| "-".to_owned(), |since| format_age(since, now_unix));
        let (mountpoint, state) = (terminal::escape_controls(&row.mountpoint), &row.state);
        let source = terminal::escape_controls(&row.source);
        let _ = writeln!(text, "{mountpoint:at$}  {source:what$}  {state:12}  {pid:>7}  {since}");
    }
    text
}

fn format_age(since_unix: u64, now_unix: u64) -> String {
    format!("{} ago", registry::describe_age(now_unix.saturating_sub(since_unix)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_content() {
        let row = MountRow {
            mountpoint: "/mnt/a-long-name".into(),
            source: "memory:".into(),
            state: "dead".into(),
            pid: Some(7),
            connection: 50,
            since_unix: Some(100),
            version: None,
            options: Vec::new(),
        };
        let text = table(&[row], 100 + 3700);
        let expected = "\
MOUNTPOINT        SOURCE   STATE             PID  SINCE
/mnt/a-long-name  memory:  dead                7  1 h 1 min ago
";
        assert_eq!(text, expected);
    }

    #[test]
    fn times_have_two_units() {
        assert_eq!(format_age(0, 5), "5 s ago");
        assert_eq!(format_age(0, 3 * 60 + 1), "3 min ago");
        assert_eq!(format_age(0, 2 * 86400 + 3600), "2 d 1 h ago");
        assert_eq!(format_age(9, 5), "0 s ago");
    }
}
