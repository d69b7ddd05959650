//! `fuse_opt_*`: argument lists, and their parser.

use std::ffi::{CStr, CString, c_char, c_int, c_ulong, c_void};
use std::ptr::null_mut;

use crate::abi::{FuseArgs, FuseOpt, OptProc};
use crate::logging::error;

/// The offset of an option without a variable.
const NO_VARIABLE: c_ulong = u32::MAX as c_ulong;

/// Keys of the processing function.
const KEY_OPT: c_int = -1;
const KEY_NONOPT: c_int = -2;
const KEY_KEEP: c_int = -3;
const KEY_DISCARD: c_int = -4;

/// Most arguments of a list.
const ARGUMENTS_MOST: usize = 1 << 16;

// SAFETY: the declaration of sscanf(3).
unsafe extern "C" {
    fn sscanf(text: *const c_char, format: *const c_char, ...) -> c_int;
}

/// The arguments of a list, copied.
///
/// # Safety
///
/// `args` is a `struct fuse_args` with its number of strings.
pub unsafe fn words(args: *const FuseArgs) -> Vec<CString> {
    // SAFETY: the caller's promise; the strings are copied before the list can change.
    unsafe { strings(args) }.into_iter().map(CStr::to_owned).collect()
}

/// The arguments of a list, for as long as it is not freed.
///
/// # Safety
///
/// `args` is a `struct fuse_args` with its number of strings.
unsafe fn strings<'a>(args: *const FuseArgs) -> Vec<&'a CStr> {
    // SAFETY: the caller's promise.
    unsafe {
        let count = usize::try_from((*args).argc).unwrap_or(0);
        if (*args).argv.is_null() {
            return Vec::new();
        }
        let slice = std::slice::from_raw_parts((*args).argv, count);
        let present = slice.iter().take_while(|word| !word.is_null());
        present.map(|&word| CStr::from_ptr(word)).collect()
    }
}

/// Replaces the arguments of a list.
///
/// # Safety
///
/// `args` is a `struct fuse_args`; with `allocated`, its strings are from malloc(3).
pub unsafe fn replace(args: *mut FuseArgs, words: &[CString]) {
    // SAFETY: the caller's promise, and memory of malloc(3) with room for all strings and the null
    // pointer.
    unsafe {
        fuse_opt_free_args(args);
        let size = (words.len() + 1) * size_of::<*mut c_char>();
        let argv = libc::malloc(size).cast::<*mut c_char>();
        assert!(!argv.is_null(), "no memory for {size} bytes");
        for (place, word) in words.iter().enumerate() {
            argv.add(place).write(libc::strdup(word.as_ptr()));
        }
        argv.add(words.len()).write(null_mut());
        args.write(FuseArgs { argc: words.len() as c_int, argv, allocated: 1 });
    }
}

/// Appends an argument. Returns -1 without memory.
///
/// # Safety
///
/// `args` is a `struct fuse_args` that is empty, or allocated; `arg` is a string.
pub unsafe extern "C" fn fuse_opt_add_arg(args: *mut FuseArgs, arg: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { fuse_opt_insert_arg(args, (*args).argc, arg) }
}

/// Inserts an argument at a position. The strings of the others stay where they are. Returns -1 for
/// a position that there is not, or too many arguments.
///
/// # Safety
///
/// `args` is a `struct fuse_args`; `arg` is a string.
pub unsafe extern "C" fn fuse_opt_insert_arg(
    args: *mut FuseArgs,
    position: c_int,
    arg: *const c_char,
) -> c_int {
    // SAFETY: the caller's promise; the array is enlarged to one more than its strings and the null
    // pointer, and moved up from the position on.
    unsafe {
        if (*args).allocated == 0 {
            let all = words(args);
            replace(args, &all);
        }
        let count = usize::try_from((*args).argc).unwrap_or(0);
        let Ok(position) = usize::try_from(position) else { return -1 };
        if position > count || count >= ARGUMENTS_MOST {
            return -1;
        }
        let size = (count + 2) * size_of::<*mut c_char>();
        let argv = libc::realloc((*args).argv.cast(), size).cast::<*mut c_char>();
        if argv.is_null() {
            return -1;
        }
        (*args).argv = argv;
        let copy = libc::strdup(arg);
        if copy.is_null() {
            return -1;
        }
        let place = argv.add(position);
        std::ptr::copy(place, place.add(1), count - position);
        place.write(copy);
        argv.add(count + 1).write(null_mut());
        (*args).argc += 1;
    }
    0
}

/// Frees the arguments of a list that were allocated.
///
/// # Safety
///
/// `args` is null or a `struct fuse_args`; with `allocated`, its strings are from malloc(3).
pub unsafe extern "C" fn fuse_opt_free_args(args: *mut FuseArgs) {
    if args.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    unsafe {
        let list = args.read();
        if !list.argv.is_null() && list.allocated != 0 {
            for place in 0..usize::try_from(list.argc).unwrap_or(0) {
                libc::free((*list.argv.add(place)).cast());
            }
            libc::free(list.argv.cast());
        }
        args.write(FuseArgs { argc: 0, argv: null_mut(), allocated: 0 });
    }
}

/// Appends an option to a list with commas.
///
/// # Safety
///
/// `list` leads to null or a string of malloc(3); `opt` is a string.
pub unsafe extern "C" fn fuse_opt_add_opt(list: *mut *mut c_char, opt: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { append_option(list, CStr::from_ptr(opt).to_bytes()) }
}

/// Appends an option to a list with commas, with a backslash before each comma and backslash of it.
///
/// # Safety
///
/// The conditions of [`fuse_opt_add_opt`].
pub unsafe extern "C" fn fuse_opt_add_opt_escaped(
    list: *mut *mut c_char,
    opt: *const c_char,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { append_option(list, &escape(CStr::from_ptr(opt).to_bytes())) }
}

fn escape(option: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(option.len());
    for &byte in option {
        if matches!(byte, b',' | b'\\') {
            text.push(b'\\');
        }
        text.push(byte);
    }
    text
}

/// # Safety
///
/// `list` leads to null or a string of malloc(3).
unsafe fn append_option(list: *mut *mut c_char, option: &[u8]) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let mut text = match (*list).is_null() {
            true => Vec::new(),
            false => CStr::from_ptr(*list).to_bytes().to_vec(),
        };
        if !(*list).is_null() {
            text.push(b',');
        }
        text.extend_from_slice(option);
        let Ok(text) = CString::new(text) else { return -1 };
        let copy = libc::strdup(text.as_ptr());
        if copy.is_null() {
            return -1;
        }
        libc::free((*list).cast());
        *list = copy;
    }
    0
}

/// Returns 1 if one of the templates matches the option.
///
/// # Safety
///
/// `opts` is a list of templates that ends with a null pointer; `opt` is a string.
pub unsafe extern "C" fn fuse_opt_match(opts: *const FuseOpt, opt: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let option = CStr::from_ptr(opt).to_bytes();
        c_int::from(
            templates(opts).iter().any(|template| template.match_template(option).is_some()),
        )
    }
}

/// A template of a `struct fuse_opt`.
struct OptionTemplate {
    text: CString,
    entry: FuseOpt,
}

impl OptionTemplate {
    /// The place of the separator (`=` or a space) of a template with a parameter, or 0; `None` if
    /// the option is another one.
    fn match_template(&self, option: &[u8]) -> Option<usize> {
        let text = self.text.to_bytes();
        let place = |wanted| text.iter().position(|&byte| byte == wanted);
        if let Some(separator) = place(b'=').or_else(|| place(b' '))
            && matches!(text.get(separator + 1), None | Some(b'%'))
        {
            let prefix = separator + usize::from(text[separator] == b'=');
            if option.starts_with(&text[..prefix]) {
                return Some(separator);
            }
        }
        (text == option).then_some(0)
    }

    /// True if the parameter is the next argument.
    fn takes_next(&self, separator: usize, option: &[u8]) -> bool {
        separator > 0 && self.text.to_bytes()[separator] == b' ' && option.len() == separator
    }
}

/// # Safety
///
/// `opts` is null, or a list of templates that ends with a null pointer.
unsafe fn templates(opts: *const FuseOpt) -> Vec<OptionTemplate> {
    let mut all = Vec::new();
    let mut next = opts;
    // SAFETY: the caller's promise; the list is left at its null pointer.
    unsafe {
        while !next.is_null() && !(*next).templ.is_null() {
            all.push(OptionTemplate {
                text: CStr::from_ptr((*next).templ).to_owned(),
                entry: *next,
            });
            next = next.add(1);
        }
    }
    all
}

/// Splits a list with commas. A backslash takes the next character as it is, or is followed by
/// three octal digits.
pub fn split_options(list: &[u8]) -> Vec<Vec<u8>> {
    let mut options = vec![Vec::new()];
    let mut bytes = list;
    while let [first, rest @ ..] = bytes {
        bytes = rest;
        let last = options.last_mut().expect("there is one from the beginning");
        match (first, rest) {
            (b',', _) => options.push(Vec::new()),
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', rest @ ..]) => {
                last.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                bytes = rest;
            }
            (b'\\', [next, rest @ ..]) => {
                last.push(*next);
                bytes = rest;
            }
            (byte, _) => last.push(*byte),
        }
    }
    options
}

/// The parser of one list of arguments.
struct OptionParser {
    templates: Vec<OptionTemplate>,
    data: *mut c_void,
    proc: Option<OptProc>,
    /// The arguments that are kept, to which the processing function adds.
    kept: FuseArgs,
    /// The options that are kept, with commas.
    options: Vec<u8>,
}

/// Parses arguments by templates, and leaves those that are kept. Options stand before a `--`,
/// alone or in lists after `-o`. `proc` decides on options without a template, on those with a key,
/// and on other arguments. Returns -1 on an error, which was printed, or which `proc` has reported.
///
/// # Safety
///
/// `args` is null or a `struct fuse_args`, `opts` is null or a list of templates that ends with a
/// null pointer, and `data` is the structure with the variables of the templates.
pub unsafe extern "C" fn fuse_opt_parse(
    args: *mut FuseArgs,
    data: *mut c_void,
    opts: *const FuseOpt,
    proc: Option<OptProc>,
) -> c_int {
    if args.is_null() {
        return 0;
    }
    // SAFETY: the caller's promise.
    unsafe {
        // Programs keep pointers to whole arguments, which stay where they are.
        let all = strings(args);
        let Some((program, rest)) = all.split_first() else { return 0 };
        let mut parser = OptionParser {
            templates: templates(opts),
            data,
            proc,
            kept: FuseArgs { argc: 0, argv: null_mut(), allocated: 0 },
            options: Vec::new(),
        };
        fuse_opt_add_arg(&mut parser.kept, program.as_ptr());
        let parsed = parser.parse(rest);
        if parsed.is_ok() {
            fuse_opt_free_args(args);
            args.write(parser.kept);
            return 0;
        }
        fuse_opt_free_args(&mut parser.kept);
    }
    -1
}

/// An argument was refused, and the error was printed.
struct Refused;

impl OptionParser {
    /// # Safety
    ///
    /// The pointers are those of [`fuse_opt_parse`].
    unsafe fn parse(&mut self, words: &[&CStr]) -> Result<(), Refused> {
        let mut at = 0;
        let mut separator = None;
        // SAFETY: the caller's promise, for all calls.
        unsafe {
            while let Some(word) = words.get(at) {
                at += 1;
                let bytes = word.to_bytes();
                if separator.is_some() || bytes.first() != Some(&b'-') || bytes.len() == 1 {
                    self.process(word, KEY_NONOPT, false)?;
                } else if bytes == b"--" {
                    fuse_opt_add_arg(&mut self.kept, word.as_ptr());
                    separator = Some(self.kept.argc);
                } else if bytes.starts_with(b"-o") {
                    let list = match &bytes[2..] {
                        [] => {
                            at += 1;
                            words.get(at - 1).ok_or_else(|| missing_error(word))?.to_bytes()
                        }
                        list => list,
                    };
                    for option in split_options(list).into_iter().filter(|it| !it.is_empty()) {
                        let option = CString::new(option).map_err(|_| missing_error(word))?;
                        self.option(&option, true, &mut None)?;
                    }
                } else {
                    let mut next = words.get(at).copied();
                    self.option(word, false, &mut next)?;
                    at += usize::from(next.is_none() && at < words.len());
                }
            }
            if !self.options.is_empty() {
                let list = CString::new(std::mem::take(&mut self.options)).map_err(|_| Refused)?;
                fuse_opt_insert_arg(&mut self.kept, 1, c"-o".as_ptr());
                fuse_opt_insert_arg(&mut self.kept, 2, list.as_ptr());
            }
            // A separator with nothing behind it separates nothing.
            let last = usize::try_from(self.kept.argc - 1).unwrap_or(0);
            let place = self.kept.argv.add(last);
            if separator.is_some() && CStr::from_ptr(*place) == c"--" {
                libc::free((*place).cast());
                place.write(null_mut());
                self.kept.argc -= 1;
            }
        }
        Ok(())
    }

    /// Handles an option by all templates that match it. Takes `next` if it is the parameter.
    ///
    /// # Safety
    ///
    /// The pointers are those of [`fuse_opt_parse`].
    unsafe fn option(
        &mut self,
        option: &CStr,
        in_list: bool,
        next: &mut Option<&CStr>,
    ) -> Result<(), Refused> {
        let bytes = option.to_bytes();
        let matching: Vec<(FuseOpt, CString, usize, bool)> = self
            .templates
            .iter()
            .filter_map(|template| {
                let separator = template.match_template(bytes)?;
                let takes_next = template.takes_next(separator, bytes);
                Some((template.entry, template.text.clone(), separator, takes_next))
            })
            .collect();
        if matching.is_empty() {
            // SAFETY: the caller's promise.
            return unsafe { self.process(option, KEY_OPT, in_list) };
        }
        let joined = match (matching.iter().any(|template| template.3), *next) {
            (false, _) => None,
            (true, None) => return Err(missing_error(option)),
            (true, Some(parameter)) => {
                *next = None;
                let both = [bytes, parameter.to_bytes()].concat();
                Some(CString::new(both).map_err(|_| Refused)?)
            }
        };
        for (entry, text, separator, takes_next) in matching {
            let option = joined.as_deref().filter(|_| takes_next).unwrap_or(option);
            if entry.offset == NO_VARIABLE {
                // SAFETY: the caller's promise.
                unsafe { self.process(option, entry.value, in_list)? };
                continue;
            }
            // SAFETY: `data` has a variable at the offset of each template, of the type that the
            // template says.
            unsafe {
                let variable = self.data.cast::<u8>().wrapping_add(entry.offset as usize);
                let format = &text.to_bytes_with_nul()[(separator + 1).min(text.count_bytes())..];
                if separator == 0 || format.len() <= 1 {
                    variable.cast::<c_int>().write(entry.value);
                } else {
                    let skip = separator + usize::from(text.to_bytes()[separator] == b'=');
                    let parameter = option.as_ptr().add(skip);
                    set_variable(variable, format.as_ptr().cast(), parameter, option)?;
                }
            }
        }
        Ok(())
    }

    /// Lets the processing function decide on an argument, and keeps it unless the function
    /// discards it.
    ///
    /// # Safety
    ///
    /// The pointers are those of [`fuse_opt_parse`].
    unsafe fn process(&mut self, word: &CStr, key: c_int, in_list: bool) -> Result<(), Refused> {
        if key == KEY_DISCARD {
            return Ok(());
        }
        if key != KEY_KEEP
            && let Some(proc) = self.proc
        {
            // SAFETY: the function is the caller's, and gets its data and a list that lives as long
            // as the parser.
            match unsafe { proc(self.data, word.as_ptr(), key, &mut self.kept) } {
                -1 => return Err(Refused),
                0 => return Ok(()),
                _ => {}
            }
        }
        if in_list {
            if !self.options.is_empty() {
                self.options.push(b',');
            }
            self.options.extend(escape(word.to_bytes()));
        } else {
            // SAFETY: the list is ours.
            unsafe { fuse_opt_add_arg(&mut self.kept, word.as_ptr()) };
        }
        Ok(())
    }
}

/// # Safety
///
/// `variable` has the type that `format` says: a string of malloc(3) or null for `%s`.
unsafe fn set_variable(
    variable: *mut u8,
    format: *const c_char,
    parameter: *const c_char,
    option: &CStr,
) -> Result<(), Refused> {
    // SAFETY: the caller's promise.
    unsafe {
        if CStr::from_ptr(format) == c"%s" {
            let text = variable.cast::<*mut c_char>();
            let copy = libc::strdup(parameter);
            libc::free((*text).cast());
            *text = copy;
            return Ok(());
        }
        if sscanf(parameter, format, variable) == 1 {
            return Ok(());
        }
    }
    error(&format!("fuse: invalid parameter in option `{}'", option.to_string_lossy()));
    Err(Refused)
}

fn missing_error(word: &CStr) -> Refused {
    error(&format!("fuse: missing argument after `{}'", word.to_string_lossy()));
    Refused
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Default)]
    struct Variables {
        flag: c_int,
        number: c_int,
        seen: Vec<(c_int, String)>,
    }

    // SAFETY: needs what `fuse_opt_parse` passes.
    unsafe extern "C" fn keep_plain(
        data: *mut c_void,
        arg: *const c_char,
        key: c_int,
        _: *mut FuseArgs,
    ) -> c_int {
        // SAFETY: the parser passes the variables and a string.
        let (data, arg) = unsafe { (&mut *data.cast::<Variables>(), CStr::from_ptr(arg)) };
        data.seen.push((key, arg.to_string_lossy().into_owned()));
        c_int::from(arg != c"drop" && arg != c"refuse") - 2 * c_int::from(arg == c"refuse") / 2
    }

    fn parse(words: &[&str], variables: &mut Variables) -> Option<Vec<String>> {
        let opts = [
            FuseOpt { templ: c"-f".as_ptr(), offset: 0, value: 7 },
            FuseOpt { templ: c"number=%d".as_ptr(), offset: 4, value: 0 },
            FuseOpt { templ: c"-n %d".as_ptr(), offset: 4, value: 0 },
            FuseOpt { templ: c"key=".as_ptr(), offset: NO_VARIABLE, value: 3 },
            FuseOpt { templ: c"gone".as_ptr(), offset: NO_VARIABLE, value: KEY_DISCARD },
            FuseOpt { templ: std::ptr::null(), offset: 0, value: 0 },
        ];
        let words: Vec<CString> = words.iter().map(|word| CString::new(*word).unwrap()).collect();
        let mut args = FuseArgs { argc: 0, argv: null_mut(), allocated: 0 };
        // SAFETY: the list is empty, the templates end with a null pointer, and the variables have
        // their offsets.
        unsafe {
            replace(&mut args, &words);
            let data = (variables as *mut Variables).cast();
            let parsed = fuse_opt_parse(&mut args, data, opts.as_ptr(), Some(keep_plain));
            let left =
                self::words(&args).iter().map(|word| word.to_str().unwrap().to_owned()).collect();
            fuse_opt_free_args(&mut args);
            (parsed == 0).then_some(left)
        }
    }

    #[test]
    fn options_reach_their_variables_and_the_rest_is_kept_in_one_list() {
        let mut variables = Variables::default();
        let left =
            parse(&["p", "a", "-f", "-o", "number=5,b,gone,drop", "-oc\\,d", "x"], &mut variables);
        assert_eq!(left.unwrap(), ["p", "-o", "b,c\\,d", "a", "x"]);
        assert_eq!((variables.flag, variables.number), (7, 5));
        let seen: Vec<_> = variables.seen.iter().map(|(key, word)| (*key, &word[..])).collect();
        assert_eq!(seen, [(-2, "a"), (-1, "b"), (-1, "drop"), (-1, "c,d"), (-2, "x")]);
    }

    #[test]
    fn a_parameter_can_be_the_next_argument() {
        let mut variables = Variables::default();
        assert_eq!(parse(&["p", "-n", "12", "x"], &mut variables).unwrap(), ["p", "x"]);
        assert_eq!(variables.number, 12);
        assert_eq!(parse(&["p", "-n34", "-okey=v"], &mut variables).unwrap(), ["p", "-o", "key=v"]);
        assert_eq!((variables.number, variables.seen.last().unwrap().0), (34, 3));
        assert!(parse(&["p", "-n"], &mut variables).is_none());
        assert!(parse(&["p", "-o"], &mut variables).is_none());
    }

    #[test]
    fn what_follows_a_separator_is_no_option() {
        let mut variables = Variables::default();
        assert_eq!(parse(&["p", "--", "-f"], &mut variables).unwrap(), ["p", "--", "-f"]);
        assert_eq!(parse(&["p", "x", "--"], &mut variables).unwrap(), ["p", "x"]);
        assert_eq!(variables.flag, 0);
    }

    #[test]
    fn a_wrong_parameter_and_a_refusal_are_errors() {
        let mut variables = Variables::default();
        assert!(parse(&["p", "-onumber=x"], &mut variables).is_none());
        assert!(parse(&["p", "refuse"], &mut variables).is_none());
    }

    #[test]
    fn escaped_options_are_split_as_they_were_joined() {
        let option = b"a,b\\c".to_vec();
        assert_eq!(split_options(&escape(&option)), [option]);
        assert_eq!(split_options(b"x\\054y,\\377"), [b"x,y".to_vec(), vec![0o377]]);
        assert_eq!(split_options(b""), [b"".to_vec()]);
    }
}
