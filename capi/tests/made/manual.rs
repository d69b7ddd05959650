//! Manual pages, in the macros of man(7).

use super::{FunctionFamily, HeaderItem, items};

/// A page: its file name and its text.
pub type ManualPage = (String, String);

/// A page for each family, and the overview.
pub fn pages(families: &[FunctionFamily]) -> Vec<ManualPage> {
    let mut pages: Vec<ManualPage> = families.iter().map(|family| page(family, families)).collect();
    pages.push(overview(families));
    pages
}

/// The name of a family's page. The title of "mount" is intentionally also the name of a function.
fn title(family: &FunctionFamily) -> String {
    format!("defuse_{}", family.name)
}

fn head(title: &str, names: &[&str], what: &str) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let names = names.join(", ");
    format!(
        ".\\\" Made of capi/src/calls/ by capi/tests/header.rs.\n\
         .TH {title} 3 \"\" \"defuse {version}\" \"Library Functions Manual\"\n\
         .SH NAME\n{names} \\- {what}\n"
    )
}

fn functions(items: &[HeaderItem]) -> impl Iterator<Item = (&str, &HeaderItem)> {
    items.iter().filter_map(|item| item.function().map(|name| (name, item)))
}

fn page(family: &FunctionFamily, families: &[FunctionFamily]) -> ManualPage {
    let (title, items) = (title(family), items(&family.declarations));
    let mut names: Vec<&str> = functions(&items).map(|(name, _)| name).collect();
    // The name of the page, by which man finds it, comes first.
    names.retain(|name| *name != title);
    names.insert(0, &title);
    let mut text = head(&title, &names, &family.title);
    text.push_str(".SH LIBRARY\nin-process file systems (\\fIlibdefuse\\fR, \\fI\\-ldefuse\\fR)\n");
    text.push_str(".SH SYNOPSIS\n.nf\n.B #include <defuse.h>\n.PP\n");
    for (_, item) in functions(&items) {
        let code = item.code.split_whitespace().collect::<Vec<_>>().join(" ");
        text.push_str(&format!(".BI \"{}\"\n", emphasize(&code)));
    }
    text.push_str(".fi\n.SH DESCRIPTION\n");
    text.push_str(&paragraphs(family.about.lines()));
    for (name, item) in functions(&items) {
        text.push_str(&format!(".TP\n.BR {name} ()\n{}", paragraphs(&item.comment)));
    }
    text.push_str(&types(&items));
    text.push_str(RETURNS);
    let others = families.iter().map(self::title).filter(|other| *other != title);
    (format!("{title}.3"), text + &see_also(others.chain(["defuse".to_owned()])))
}

const RETURNS: &str = "\
.SH RETURN VALUE AND ERRORS
Where nothing else is said, a function returns what the call of the same name returns without the prefix,
and fails with the same
.IR errno .
.TP
.B EXDEV
The path lies outside of all mounts of this process.
.TP
.B EFAULT
A pointer is NULL that must not be.
.TP
.B EIO
The file system failed, or panicked.
.SH ATTRIBUTES
All functions may be called by several threads at once.
";

fn types(items: &[HeaderItem]) -> String {
    let mut text = String::new();
    for item in items.iter().filter(|item| item.function().is_none()) {
        if text.is_empty() {
            text.push_str(".SH TYPES AND CONSTANTS\n");
        }
        let code: Vec<String> = compact(&item.code).iter().map(|line| escape(line)).collect();
        text.push_str(&format!(".PP\n.nf\n{}\n.fi\n.PP\n", code.join("\n")));
        text.push_str(&paragraphs(&item.comment));
    }
    text
}

/// A definition with each comment on one line.
fn compact(code: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut comment: Option<Vec<&str>> = None;
    for line in code.lines() {
        match (line.trim(), &mut comment) {
            ("/**", _) => comment = Some(Vec::new()),
            ("*/", Some(words)) => {
                lines.push(format!("  /* {} */", words.join(" ")));
                comment = None;
            }
            (text, Some(words)) => words.push(text.trim_start_matches('*').trim()),
            _ => lines.push(line.to_owned()),
        }
    }
    lines
}

fn overview(families: &[FunctionFamily]) -> ManualPage {
    let mut text =
        head("defuse", &["defuse"], "file systems inside of the application's own process");
    text.push_str(".SH LIBRARY\nin-process file systems (\\fIlibdefuse\\fR, \\fI\\-ldefuse\\fR)\n");
    text.push_str(".SH SYNOPSIS\n.nf\n.B #include <defuse.h>\n.PP\n");
    text.push_str(
        "cc program.c $(pkg\\-config \\-\\-cflags \\-\\-libs defuse)\n.fi\n.SH DESCRIPTION\n",
    );
    text.push_str(&paragraphs(ABOUT.lines()));
    for family in families {
        text.push_str(&format!(".TP\n.BR {} (3)\n{}:\n", title(family), escape(&family.title)));
        let items = items(&family.declarations);
        let names: Vec<String> = functions(&items).map(|(name, _)| format!("{name}()")).collect();
        text.push_str(&format!("{}.\n", names.join(",\n")));
    }
    text.push_str(".SH EXAMPLES\n.nf\n");
    for line in EXAMPLE.lines() {
        text.push_str(&escape(line));
        text.push('\n');
    }
    text.push_str(".fi\n");
    ("defuse.3".to_owned(), text + &see_also(families.iter().map(title)))
}

const ABOUT: &str = "\
A program mounts file systems into itself, as many as it likes and of any types, and uses them by the
calls of POSIX with the prefix defuse_. No call enters the kernel on their behalf (a passthrough's own
calls do), no privilege is needed, and no other process sees the mounts.

Descriptors are numbers of a table of the library, and mean nothing to the calls without the prefix. A
path outside of all mounts gives EXDEV: the library passes nothing on to the kernel. All functions may be
called by any thread; they do not cancel threads, and are not for handlers of signals. After a fork(2)
both processes have a copy of everything that is in memory.

The families of functions:
";

const EXAMPLE: &str = "\
if (defuse_mount(\"mem:\", \"memory:,size=1M\") < 0)
    errx(1, \"%s\", defuse_last_error());
int fd = defuse_open(\"mem:/hello\", O_RDWR | O_CREAT, 0644);
defuse_write(fd, \"hello\", 5);
defuse_close(fd);
defuse_unmount(\"mem:\", 0);
";

fn see_also(names: impl Iterator<Item = String>) -> String {
    let mut names: Vec<String> = names.collect();
    names.sort();
    let names: Vec<String> = names.iter().map(|name| format!(".BR {name} (3)")).collect();
    format!(".SH SEE ALSO\n{}\n", names.join(" ,\n"))
}

/// The text with a request for each paragraph.
fn paragraphs<T: AsRef<str>>(lines: impl IntoIterator<Item = T>) -> String {
    let mut text = String::new();
    for line in lines {
        match line.as_ref().trim() {
            "" => text.push_str(".PP\n"),
            line => {
                text.push_str(&escape(line));
                text.push('\n');
            }
        }
    }
    text
}

/// Escapes a line of text for troff.
fn escape(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-").replace('`', "");
    match line.starts_with(['.', '\'']) {
        true => format!("\\&{line}"),
        false => line,
    }
}

/// A prototype for `.BI`: bold, with the names of arguments in italics.
fn emphasize(code: &str) -> String {
    let mut text = String::new();
    for (number, part) in code.split_inclusive([',', ')']).enumerate() {
        let is_end = part.ends_with([',', ')']);
        let (body, end) = part.split_at(part.len() - usize::from(is_end));
        let name = body.rfind([' ', '*']).map(|place| place + 1);
        match name.filter(|&place| is_end && !body[place..].ends_with("void") && number < 99) {
            Some(place) if !body[place..].starts_with('.') => {
                text.push_str(&format!("{}\" {} \"{end}", &body[..place], &body[place..]));
            }
            _ => text.push_str(part),
        }
    }
    text
}
