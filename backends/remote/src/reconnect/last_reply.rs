//! The last reply to a frequent request, for the time in which a server does not answer.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use defuse_fs::Result;

/// The maximum number of calls that wait for the server.
const MOST_ASKING: u32 = 2;
/// The time for which other calls wait for them.
const PATIENCE: Duration = Duration::from_millis(50);

/// A reply. While [`MOST_ASKING`] calls wait for the server, other calls get the last reply if
/// those have not ended in time.
pub(super) struct LastAnswer<T> {
    state: Mutex<LastAnswerState<T>>,
    ended: Condvar,
}

struct LastAnswerState<T> {
    last: Option<T>,
    asking: u32,
}

impl<T> Default for LastAnswer<T> {
    fn default() -> Self {
        LastAnswer {
            state: Mutex::new(LastAnswerState { last: None, asking: 0 }),
            ended: Condvar::new(),
        }
    }
}

impl<T: Copy> LastAnswer<T> {
    pub(super) fn get_or_request(&self, ask: impl FnOnce() -> Result<T>) -> Result<T> {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.lock();
        while state.asking >= MOST_ASKING {
            let left = deadline.saturating_duration_since(Instant::now());
            match state.last {
                Some(last) if left.is_zero() => return Ok(last),
                // There is no reply to return yet.
                None if left.is_zero() => break,
                _ => {}
            }
            let waited = self.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.asking += 1;
        drop(state);
        let asking = QuestionGuard(self);
        let answer = ask();
        if let Ok(answer) = answer {
            self.lock().last = Some(answer);
        }
        drop(asking);
        answer
    }

    fn lock(&self) -> MutexGuard<'_, LastAnswerState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends a request to the server, also after a panic.
struct QuestionGuard<'a, T: Copy>(&'a LastAnswer<T>);

impl<T: Copy> Drop for QuestionGuard<'_, T> {
    fn drop(&mut self) {
        self.0.lock().asking -= 1;
        self.0.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use defuse_fs::Errno;

    use super::*;

    /// Every path through a device that did not answer held a thread of its client.
    #[test]
    fn few_calls_wait_for_a_server_that_does_not_answer_and_others_get_the_last_answer() {
        let kept = LastAnswer::default();
        assert_eq!(kept.get_or_request(|| Ok(1)), Ok(1));
        assert_eq!(kept.get_or_request(|| Ok(2)), Ok(2));
        std::thread::scope(|scope| {
            let (begun, begins) = channel();
            let waiting: Vec<_> = (0..MOST_ASKING)
                .map(|_| {
                    let (answers, answer) = channel();
                    let (kept, begun) = (&kept, begun.clone());
                    let wait = move || {
                        kept.get_or_request(|| {
                            begun.send(()).unwrap();
                            answer.recv().map_err(|_| Errno::EIO)
                        })
                    };
                    (answers, scope.spawn(wait))
                })
                .collect();
            (0..MOST_ASKING).for_each(|_| begins.recv().unwrap());
            for _ in 0..3 {
                assert_eq!(kept.get_or_request(|| unreachable!("too many ask")), Ok(2));
            }
            for (number, (answers, thread)) in waiting.into_iter().enumerate() {
                answers.send(3 + number as i32).unwrap();
                assert_eq!(thread.join().unwrap(), Ok(3 + number as i32));
            }
        });
        // Errors are not kept.
        assert_eq!(kept.get_or_request(|| Err(Errno::EIO)), Err(Errno::EIO));
        assert_eq!(kept.get_or_request(|| Ok(9)), Ok(9));
    }
}
