//! `defuse man` and `defuse help`, generated from the definitions of the parser.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::builder::Resettable;
use clap::{Command, CommandFactory};
use clap_mangen::Man;
use defuse_command::man::{make_directory, pages, write};

use crate::error::{CommandFailure, Result, print};
use crate::sources::SOURCES;
use crate::{DefuseCli, mount, options, study};

/// Write the manual pages
#[derive(clap::Args)]
pub struct ManPageArgs {
    /// Write all pages into this directory, instead of defuse(1) to the standard output
    dir: Option<PathBuf>,
}

/// Explain a command, or all options of a mount
#[derive(clap::Args)]
pub struct HelpArgs {
    /// A command, or `options`
    topic: Option<String>,
}

/// The meaning of exit codes, for the manual and for `--help`.
pub const EXIT_CODES: &[(&str, &str)] = &[
    ("0", "Done. For mount: the mount is ready (with --foreground: it has ended)."),
    (
        "1",
        "The operation failed; the message says why, and what to do. For umount, and mount \
         --foreground: also where the mount has ended but not everything could be made durable.",
    ),
    ("2", "The command line or an option is wrong; nothing was done."),
    ("130", "Ctrl-C has ended mkfs, grow or dump. (fsck has the codes of fsck(8).)"),
];

const SIGNALS: &[(&str, &str)] = &[
    (
        "SIGTERM, SIGINT, SIGHUP",
        "Unmount and exit, also if the file system is mounted elsewhere, too. A mount in use is detached, \
      and ends when its last file is closed. A second signal aborts the connection: requests then fail.",
    ),
    ("SIGUSR1", "Write the statistics to the log."),
];

const FILES: &[(&str, &str)] = &[
    (
        "/run/defuse/N.json",
        "Mounts of root; N is the number of the FUSE connection. Other users \
      have $XDG_RUNTIME_DIR/defuse, /run/user/UID/defuse or ~/.local/state/defuse: the first of them whose \
      parent belongs to the user alone, and which nobody else can exchange. The variable \
      DEFUSE_RUNTIME_DIR overrides all of them.",
    ),
    ("/run/defuse/N.sock", "The control socket of the mount, for its owner and root."),
    (
        "/run/defuse/serve-PID.json, serve-PID.sock",
        "The same for a server (defuse serve, defuse manager).",
    ),
    (
        "../lib/defuse/libdefuse_preload.so",
        "The library that `defuse run` loads into programs, relative to the directory of defuse, or beside \
      it. Without it, the program unpacks its own copy. The variable DEFUSE_PRELOAD_LIBRARY overrides both.",
    ),
    (
        "/var/cache/defuse/library-*, ~/.cache/defuse/library-*",
        "Unpacked copies of that library, of root and of other users. One that no run has used for a month is \
      removed; they may be removed whenever no program of a run is left.",
    ),
    (
        "~/.cache/defuse",
        "The addresses in libraries that `defuse run` patches, by build id; in $XDG_CACHE_HOME if it is \
      set. The directory may be removed at any time.",
    ),
    (
        "/sbin/mount.fuse.defuse",
        "For mount(8) and fstab(5): a symbolic link to the program \
      (ln -s /usr/bin/defuse /sbin/mount.fuse.defuse). Its exit codes are those of mount(8): 1 for \
      wrong use, 32 for a mount that failed. A mount by root has dev and suid unless nodev and nosuid are \
      given, as with mount.fuse3(8).",
    ),
    (
        "/sbin/umount.fuse.defuse",
        "The same for umount(8), which then waits until everything is durable. A mount of uhs by root has the \
      type fuseblk.defuse: umount(8) waits for it without a helper, and calls umount.fuseblk.defuse and \
      mount.fuseblk.defuse (for -o remount) if they are links to the program, too.",
    ),
];

const EXAMPLES: &[(&str, &str)] = &[
    ("defuse mount passthrough:/srv/data /mnt/data", "Serve a directory, in the background."),
    ("defuse mount memory: /mnt/scratch -o size=1G,mode=700", "Files in memory, at most 1 GiB."),
    (
        "defuse mount passthrough:/srv /mnt --profile opt -o no_splice",
        "A configuration of Stackfs, with a change.",
    ),
    ("defuse serve memory: /run/scratch", "Share files in memory with other processes."),
    ("defuse mount socket:/run/scratch /mnt", "Mount a file system that another process serves."),
    ("defuse stat /mnt/data --watch 1", "Its activity, every second."),
    ("defuse stat /run/scratch", "Requests of a server, its clients, and what they hold."),
    ("defuse stat /mnt/sshfs --for 10", "The time of any FUSE file system by stages (as root)."),
    ("defuse trace /mnt/data --errors", "Failing requests, live (as root)."),
    ("defuse umount /mnt/data", "Unmount, and wait until everything is durable."),
    ("passthrough:/srv/data /mnt/data fuse.defuse allow_other,nofail 0 0", "A line of fstab."),
];

/// Writes the manual pages.
pub fn run(args: &ManPageArgs) -> Result {
    let Some(dir) = &args.dir else {
        return print(&main_page(&mut build_command())?);
    };
    make_directory(dir)?;
    let mut command = build_command();
    write(dir, "defuse.1", &main_page(&mut command)?)?;
    // The program `defuse-study` writes the pages of its commands.
    let is_own = |(_, command): &(String, &Command)| !study::COMMANDS.contains(&command.get_name());
    for (name, subcommand) in pages(&command, "defuse").into_iter().filter(is_own) {
        // Roff would run the lines of the tables together.
        let page = subcommand
            .clone()
            .name(name.clone())
            .after_help(Resettable::Reset)
            .after_long_help(Resettable::Reset);
        let mut page = render(&Man::new(page))?;
        if subcommand.get_name() == "mount" {
            option_sections(&mut page);
        }
        write(dir, &format!("{name}.1"), &page)?;
    }
    for helper in ["mount.fuse.defuse.8", "umount.fuse.defuse.8"] {
        write(dir, helper, ".so man1/defuse.1\n")?;
    }
    Ok(())
}

/// Prints help about a topic.
pub fn help(args: &HelpArgs) -> Result {
    let mut command = build_command();
    match args.topic.as_deref() {
        None => print(&command.render_long_help().to_string()),
        Some("options") => print(&options::help()),
        Some(topic) if study::COMMANDS.contains(&topic) => study::help(topic),
        Some(topic) => match command.find_subcommand_mut(topic) {
            Some(subcommand) => print(&subcommand.render_long_help().to_string()),
            None => Err(CommandFailure::Usage(format!(
                "there is no help about {topic}: ask for a command (defuse --help) or for options"
            ))),
        },
    }
}

/// The text after the arguments in `defuse mount --help`.
pub fn mount_help() -> String {
    format!("{}\nSources:\n{}\n{}", mount::CONFIG_HELP, SOURCES.help(), options::help())
}

/// The text after the commands in `defuse --help`.
pub fn main_help() -> String {
    let mut text = "Exit codes:\n".to_owned();
    for (code, meaning) in EXIT_CODES {
        let _ = writeln!(text, "  {code}  {meaning}");
    }
    text + "\nExample: defuse mount passthrough:/srv/data /mnt/data && defuse stat /mnt/data\n"
}

fn build_command() -> Command {
    let mut command = DefuseCli::command();
    command.build();
    command
}

/// defuse(1): the page that clap renders, and further sections.
fn main_page(command: &mut Command) -> Result<String> {
    // The exit codes have a section of their own here.
    let command = command.clone().after_help(Resettable::Reset).after_long_help(Resettable::Reset);
    let mut page = render(&Man::new(command))?;
    option_sections(&mut page);
    for (title, rows) in [
        ("SIGNALS", SIGNALS),
        ("FILES", FILES),
        ("EXIT STATUS", EXIT_CODES),
        ("EXAMPLES", EXAMPLES),
    ] {
        section(&mut page, title, rows.iter().copied());
    }
    Ok(page)
}

/// The sections of sources and of all options for `-o`.
fn option_sections(page: &mut String) {
    section(page, "SOURCES", SOURCES.kinds().map(|kind| (kind.facts().form, kind.facts().help)));
    for (title, options) in options::parts() {
        let title = format!("OPTIONS {}", title.to_uppercase());
        let rows: Vec<_> = options.iter().map(|(form, help)| (form.clone(), *help)).collect();
        section(page, &title, rows.iter().map(|(form, help)| (form.as_str(), *help)));
    }
    let names: Vec<_> = options::capability_options().into_iter().map(|(name, _)| name).collect();
    let help = "Disable a capability of INIT. `defuse stat --negotiated` shows those in use.";
    section(page, "OPTIONS OF INIT", [(names.join(", ").as_str(), help)].into_iter());
}

fn render(page: &Man) -> Result<String> {
    let mut text = Vec::new();
    page.render(&mut text).map_err(CommandFailure::from_error)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn section<'a>(page: &mut String, title: &str, rows: impl Iterator<Item = (&'a str, &'a str)>) {
    let _ = writeln!(page, ".SH \"{}\"", roff(title));
    for (term, text) in rows {
        let _ = writeln!(page, ".TP\n\\fB{}\\fR\n{}", roff(term), roff(text));
    }
}

/// Quotes text for roff, also at the beginning of a line.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('"', "\\(dq");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_definitions_are_consistent() {
        DefuseCli::command().debug_assert();
    }

    #[test]
    fn the_manual_has_every_section_and_option() {
        let page = main_page(&mut build_command()).unwrap();
        for title in
            ["SOURCES", "OPTIONS OF MEMORY:", "SIGNALS", "FILES", "EXIT STATUS", "EXAMPLES"]
        {
            assert!(
                !page.contains("EXTRA") && page.contains(&format!(".SH \"{title}\"")),
                "{title}"
            );
        }
        for (form, _) in options::parts().into_iter().flat_map(|(_, options)| options) {
            assert!(page.contains(&roff(&form)), "{form}");
        }
    }

    #[test]
    fn commands_within_commands_have_pages() {
        let command = build_command();
        let names: Vec<String> =
            pages(&command, "defuse").into_iter().map(|(name, _)| name).collect();
        for expected in ["defuse-mount", "defuse-bench", "defuse-nvme-list"] {
            assert!(names.iter().any(|name| name == expected), "{names:?}");
        }
        assert!(!names.iter().any(|name| name.contains("worker")), "{names:?}");
    }

    #[test]
    fn roff_does_not_interpret_text() {
        assert_eq!(roff(r"a-b\c"), r"a\-b\ec");
        assert_eq!(roff(".TH"), "\\&.TH");
    }
}
