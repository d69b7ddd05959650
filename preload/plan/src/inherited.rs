//! The descriptors that lead from one program of a run to the next.

use std::fmt;
use std::str::FromStr;

use crate::codec::{MalformedState, StateError};

/// The version of the execution state: of the text of [`InheritedDescriptors`], and of the text
/// that a program leaves to the next one ([`ExecState::text`]). SPEC.md describes both.
pub const EXEC_STATE_VERSION: u64 = 3;

/// The descriptors that a program of a run inherits, by their numbers.
///
/// As text, the value of [`crate::VARIABLE`]: `EXEC_STATE_VERSION` and then the numbers in the
/// order of the fields, with colons between; sockets with commas between, nothing for no leash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InheritedDescriptors {
    /// The shared memory.
    pub memory: i32,
    /// The [`crate::ProgramPlan`].
    pub plan: i32,
    /// The sockets at which the run serves file systems: `O_PATH` descriptors, because the sockets
    /// have no names. A program connects by `/proc/self/fd/NUMBER`.
    pub sockets: Vec<i32>,
    /// The end of a pipe, for reading, whose other end closes when the run ends; where programs are
    /// to end then, too.
    pub leash: Option<i32>,
    /// The state that the program before left at execve(2); `None` for the first program of a run.
    pub state: Option<ExecState>,
}

/// The state that one program leaves to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExecState {
    /// The descriptor with the text that lists the open files.
    pub text: i32,
    /// Descriptors from this number on belong to the library.
    pub floor: i32,
    /// A static program that the library is to load.
    pub program: Option<i32>,
}

impl fmt::Display for InheritedDescriptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sockets: Vec<String> = self.sockets.iter().map(i32::to_string).collect();
        let leash = self.leash.map(|leash| leash.to_string()).unwrap_or_default();
        write!(f, "{EXEC_STATE_VERSION}:{}:{}:", self.memory, self.plan)?;
        write!(f, "{}:{leash}", sockets.join(","))?;
        let Some(ExecState { text, floor, program }) = self.state else { return Ok(()) };
        write!(f, ":{text}:{floor}")?;
        program.map_or(Ok(()), |program| write!(f, ":{program}"))
    }
}

impl FromStr for InheritedDescriptors {
    type Err = StateError;

    fn from_str(text: &str) -> Result<Self, StateError> {
        let (version, text) = text.split_once(':').ok_or(MalformedState)?;
        let version = version.parse().map_err(|_| MalformedState)?;
        StateError::check_version("execution state", version, EXEC_STATE_VERSION)?;
        Ok(Self::parse(text)?)
    }
}

impl InheritedDescriptors {
    /// The text behind the version.
    fn parse(text: &str) -> Result<Self, MalformedState> {
        let number = |text: &str| match text.parse() {
            Ok(number) if number >= 0 => Ok(number),
            _ => Err(MalformedState),
        };
        let words: Vec<&str> = text.split(':').collect();
        let (&[memory, plan, sockets, leash], rest) =
            words.split_first_chunk().ok_or(MalformedState)?;
        let state = match *rest {
            [] => None,
            [text, floor] => Some((text, floor, None)),
            [text, floor, program] => Some((text, floor, Some(program))),
            _ => return Err(MalformedState),
        };
        let state = state.map(|(text, floor, program)| {
            let program = program.map(number).transpose()?;
            Ok(ExecState { text: number(text)?, floor: number(floor)?, program })
        });
        let sockets = sockets.split(',').filter(|socket| !socket.is_empty()).map(number);
        Ok(InheritedDescriptors {
            memory: number(memory)?,
            plan: number(plan)?,
            sockets: sockets.collect::<Result<_, _>>()?,
            leash: if leash.is_empty() { None } else { Some(number(leash)?) },
            state: state.transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_inherited_comes_back_from_its_text() {
        let first = InheritedDescriptors { memory: 3, plan: 4, ..InheritedDescriptors::default() };
        let state = ExecState { text: 9, floor: 1024, program: None };
        let second = InheritedDescriptors { sockets: vec![5], state: Some(state), ..first.clone() };
        let state = ExecState { program: Some(77), ..state };
        let (sockets, leash, state) = (vec![5, 6], Some(8), Some(state));
        let third = InheritedDescriptors { sockets, leash, state, ..first.clone() };
        let texts = ["3:3:4::", "3:3:4:5::9:1024", "3:3:4:5,6:8:9:1024:77"];
        for (all, text) in [first, second, third].into_iter().zip(texts) {
            assert_eq!(all.to_string(), text);
            assert_eq!(text.parse(), Ok(all));
        }
    }

    #[test]
    fn a_text_that_is_none_is_refused() {
        for text in ["", "3", "3:4:", "3:x::", "3:4:5::6", "3:4:-5:", "3:4:::6:7:8:9", "-3:4::"] {
            let text = format!("3:{text}");
            assert_eq!(text.parse::<InheritedDescriptors>(), Err(StateError::Malformed), "{text}");
        }
        assert_eq!("x:3:4::".parse::<InheritedDescriptors>(), Err(StateError::Malformed));
    }

    #[test]
    fn a_text_of_another_version_is_refused_by_its_version() {
        let error = "7:anything".parse::<InheritedDescriptors>().unwrap_err();
        let format = "execution state";
        assert_eq!(error, StateError::Version { format, found: 7, known: EXEC_STATE_VERSION });
        assert!(error.to_string().contains("version 7"), "{error}");
    }
}
