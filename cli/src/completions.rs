//! `defuse completions`: scripts for shells. The script starts this program again for each
//! completion, so that sources, options and mounts of this moment are proposed.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;
use clap_complete::engine::{
    ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter,
};
use clap_complete::env::{Bash, CompleteEnv, Elvish, EnvCompleter, Fish, Powershell, Shells, Zsh};
use defuse_fs::source::{SourceKind, SourceRest};
use defuse_fuse::mount::fuse_mounts;

use crate::error::{CommandFailure, Result, print};
use crate::sources::SOURCES;
use crate::{DefuseCli, options, registry, servers};

/// The variable in which the script of a shell names itself.
const VARIABLE: &str = "DEFUSE_COMPLETE";

/// All shells that can be served.
const SHELLS: Shells<'_> = Shells(&[&BashWords, &Elvish, &Fish, &Powershell, &Zsh]);

/// Write a completion script
#[derive(clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Writes a completion script.
pub fn run(args: &CompletionsArgs) -> Result {
    let name = args.shell.to_string();
    let Some(shell) = SHELLS.completer(&name) else {
        return Err(CommandFailure::Usage(format!("there are no completions for {name}")));
    };
    let mut script = Vec::new();
    shell
        .write_registration(VARIABLE, "defuse", "defuse", "defuse", &mut script)
        .map_err(CommandFailure::from_error)?;
    print(&String::from_utf8_lossy(&script))
}

/// Answers the script of a shell, if it has started this process, and ends the process.
pub fn answer_shell() {
    if std::env::var_os(VARIABLE).is_some() {
        let answering = CompleteEnv::with_factory(DefuseCli::command);
        answering.var(VARIABLE).bin("defuse").completer("defuse").shells(SHELLS).complete();
    }
}

/// Proposes mount points of this program, for commands that act on them.
pub fn own_mounts() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let mounts = registry::list_all();
        let shown = mounts.iter().map(|found| (found.shown_mountpoint(), &found.entry.source));
        let all = shown.map(|(path, source)| candidate(&path, source));
        or_paths(matching(all, current), current)
    })
}

/// Proposes mount points of any FUSE file system, and the sockets of servers.
pub fn all_mounts() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let mounts = fuse_mounts().unwrap_or_default();
        let mounts =
            mounts.iter().map(|mount| (mount.mount_point.as_os_str(), mount.fstype.as_str()));
        let mounts: Vec<_> = mounts.map(|(path, help)| candidate(path, help)).collect();
        let servers = servers::list_all();
        let servers = servers.iter().map(|server| candidate(&server.socket, &server.source));
        or_paths(matching(mounts.into_iter().chain(servers), current), current)
    })
}

/// Proposes kinds of sources, and paths after the colon of a kind that takes a path.
pub fn sources() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| source_candidates(current))
}

/// Proposes programs for the first word of a command, and paths for the others.
pub fn command() -> ArgValueCompleter {
    ArgValueCompleter::new(CommandWords)
}

struct CommandWords;

impl ValueCompleter for CommandWords {
    fn complete(&self, current: &OsStr) -> Vec<CompletionCandidate> {
        PathCompleter::any().complete(current)
    }

    fn complete_at(&self, index: usize, current: &OsStr) -> Vec<CompletionCandidate> {
        if index > 0 || current.as_bytes().contains(&b'/') {
            return self.complete(current);
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let entries = std::env::split_paths(&path).filter_map(|dir| dir.read_dir().ok()).flatten();
        let names: BTreeSet<_> = entries.flatten().map(|entry| entry.file_name()).collect();
        let matching = |name: &OsString| name.as_bytes().starts_with(current.as_bytes());
        names.into_iter().filter(matching).map(CompletionCandidate::new).collect()
    }
}

/// Proposes the types of `defuse mkfs`.
pub fn image_kinds() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let kinds = SOURCES.kinds().filter(|kind| kind.images().is_some());
        matching(kinds.map(|kind| candidate(kind.facts().name, kind.facts().help)), current)
    })
}

/// Proposes what `defuse run --mount` takes: an absolute path, `=`, a source, and options after
/// commas.
pub fn run_mounts() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let text = current.as_bytes();
        let Some(equals) = text.iter().position(|&byte| byte == b'=') else {
            return PathCompleter::dir().complete(current);
        };
        let (prefix, source) = text.split_at(equals + 1);
        let kind_end = source.iter().position(|&byte| byte == b':');
        let kind = kind_end.and_then(|end| kind_of(&source[..end]));
        let found = match (kind, last_option(source)) {
            (Some(kind), Some(at)) => {
                let names = kind.options();
                let names = names.iter().map(|option| (option.form.as_str(), option.help));
                with_prefix(&source[..at], option_candidates(names, &source[at..]))
            }
            _ => source_candidates(OsStr::from_bytes(source)),
        };
        with_prefix(prefix, found)
    })
}

/// Proposes the options of all mounts and sources, after the last comma.
pub fn mount_options() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let text = current.as_bytes();
        let at = last_option(text).unwrap_or(0);
        let parts = options::parts();
        let known = parts.iter().flat_map(|(_, lines)| lines);
        let known = known.map(|(form, help)| (form.as_str(), *help));
        with_prefix(&text[..at], option_candidates(known, &text[at..]))
    })
}

/// The start of the option after the last comma.
fn last_option(text: &[u8]) -> Option<usize> {
    text.iter().rposition(|&byte| byte == b',').map(|comma| comma + 1)
}

/// Options that begin with `current`, each once, with `=` if they take a value.
fn option_candidates<'a>(
    known: impl Iterator<Item = (&'a str, &'a str)>,
    current: &[u8],
) -> Vec<CompletionCandidate> {
    let mut seen = BTreeSet::new();
    let names = known.filter_map(|(form, help)| {
        let end = form.find(['=', '[']).map_or(form.len(), |end| end + 1);
        let name = form[..end].replace('[', "");
        seen.insert(name.clone()).then(|| candidate(&name, help))
    });
    matching(names, OsStr::from_bytes(current))
}

fn source_candidates(current: &OsStr) -> Vec<CompletionCandidate> {
    let text = current.as_bytes();
    let Some(colon) = text.iter().position(|&byte| byte == b':') else {
        let kinds = SOURCES.kinds().map(|kind| kind.facts());
        return matching(
            kinds.map(|about| candidate(format!("{}:", about.name), about.help)),
            current,
        );
    };
    let (prefix, rest) = text.split_at(colon + 1);
    match kind_of(&text[..colon]).map(|kind| kind.facts().rest) {
        Some(SourceRest::Path) => {
            with_prefix(prefix, PathCompleter::any().complete(OsStr::from_bytes(rest)))
        }
        _ => Vec::new(),
    }
}

fn kind_of(name: &[u8]) -> Option<&'static dyn SourceKind> {
    SOURCES.kinds().find(|kind| kind.facts().name.as_bytes() == name)
}

fn candidate(value: impl Into<OsString>, help: &str) -> CompletionCandidate {
    CompletionCandidate::new(value).help(Some(help.to_owned().into()))
}

fn matching(
    all: impl Iterator<Item = CompletionCandidate>,
    current: &OsStr,
) -> Vec<CompletionCandidate> {
    // A shell may take a line feed in a name for the end of a command.
    let fits = |found: &CompletionCandidate| {
        let value = found.get_value().as_bytes();
        value.starts_with(current.as_bytes()) && !value.iter().any(u8::is_ascii_control)
    };
    all.filter(fits).collect()
}

/// Paths where nothing is known by name: a mount can be given by a relative path, too.
fn or_paths(found: Vec<CompletionCandidate>, current: &OsStr) -> Vec<CompletionCandidate> {
    if found.is_empty() { PathCompleter::any().complete(current) } else { found }
}

fn with_prefix(prefix: &[u8], found: Vec<CompletionCandidate>) -> Vec<CompletionCandidate> {
    let whole = |found: CompletionCandidate| {
        let value = [prefix, found.get_value().as_bytes()].concat();
        CompletionCandidate::new(OsString::from_vec(value)).help(found.get_help().cloned())
    };
    found.into_iter().map(whole).collect()
}

/// Completion for bash, which divides words at colons and equals signs: `uhs:/srv/image` and
/// `/data=memory:` would be three words each.
struct BashWords;

/// `words` are those between blanks up to the cursor. Bash replaces only what follows the last sign
/// that divides words, so that the text before it is cut from the answers.
const BASH: &str = r#"_defuse() {
    local line="${COMP_LINE:0:COMP_POINT}" rest word current prefix i
    local words=()
    rest="$line"
    for ((i = 0; i <= COMP_CWORD; i++)); do
        word="${COMP_WORDS[i]}"
        if ((i == 0)) || [[ "$rest" == [[:blank:]]* ]]; then
            rest="${rest#"${rest%%[![:blank:]]*}"}"
            words+=("")
        fi
        if ((i == COMP_CWORD)); then
            word="$rest"
        fi
        words[${#words[@]}-1]+="$word"
        rest="${rest#"$word"}"
    done
    current="${words[${#words[@]}-1]}"
    prefix=""
    if [[ "$COMP_WORDBREAKS" == *:* && "$current" == *[:=]* ]]; then
        prefix="${current%"${current##*[:=]}"}"
    fi
    mapfile -d $'\013' -t COMPREPLY < <(_CLAP_IFS=$'\013' \
        _CLAP_COMPLETE_INDEX="$((${#words[@]} - 1))" VARIABLE="bash" "COMPLETER" -- "${words[@]}")
    for i in "${!COMPREPLY[@]}"; do
        word="${COMPREPLY[i]}"
        if [[ "$word" == *[=/:,] ]]; then
            compopt -o nospace 2> /dev/null
        fi
        word="${word#"$prefix"}"
        if [[ "$word" == *[!A-Za-z0-9_./:=,@%+~-]* ||
            "$word" == \~* && "$current" != \~* ]]; then
            printf -v word "%q" "$word"
        fi
        COMPREPLY[i]="$word"
    done
}
complete -o bashdefault -F _defuse PROGRAM
"#;

/// The byte between two candidates, which the script chooses.
fn separator() -> u8 {
    let chosen = std::env::var_os("_CLAP_IFS");
    chosen.and_then(|text| text.as_bytes().first().copied()).unwrap_or(b'\n')
}

/// Leaves out candidates with control characters. Any user may name a directory so, and a shell
/// that inserts a line feed executes what follows it.
fn without_controls(found: &[u8], separator: u8) -> Vec<u8> {
    let words = found.split(|&byte| byte == separator);
    let kept: Vec<&[u8]> = words.filter(|word| !word.iter().any(u8::is_ascii_control)).collect();
    kept.join(&separator)
}

impl EnvCompleter for BashWords {
    fn name(&self) -> &'static str {
        Bash.name()
    }

    fn is(&self, name: &str) -> bool {
        Bash.is(name)
    }

    fn write_registration(
        &self,
        variable: &str,
        _name: &str,
        program: &str,
        completer: &str,
        script: &mut dyn io::Write,
    ) -> io::Result<()> {
        let text = BASH.replace("VARIABLE", variable).replace("COMPLETER", completer);
        script.write_all(text.replace("PROGRAM", program).as_bytes())
    }

    fn write_complete(
        &self,
        command: &mut clap::Command,
        words: Vec<OsString>,
        directory: Option<&Path>,
        answer: &mut dyn io::Write,
    ) -> io::Result<()> {
        let mut found = Vec::new();
        Bash.write_complete(command, words, directory, &mut found)?;
        answer.write_all(&without_controls(&found, separator()))
    }
}
