//! The frame that the kernel makes of a signal: its record of the interrupted thread.

// `struct ucontext` of the kernel, arch/x86/include/uapi/asm/sigcontext.h: what follows the 40
// bytes of flags, link and stack.
pub const LINK: usize = 8;
const STACK: usize = 16;
const REGISTERS: usize = 40;
const STATE: usize = REGISTERS + 23 * 8;
pub const MASK: usize = STATE + 9 * 8;
/// Before it the frame has the address to return to, behind it the information about the signal.
pub const FRAME: usize = 8 + MASK + 8 + 128;

/// The kernel's record of an interrupted thread.
pub struct SignalContext(pub *mut u64);

impl SignalContext {
    fn register(&mut self, number: libc::c_int) -> &mut u64 {
        // SAFETY: the kernel passed the address of its record to our handler, which is under way;
        // the numbers are the record's own register numbers.
        unsafe { &mut *self.0.byte_add(REGISTERS + number as usize * 8) }
    }

    /// The number of the call, of which the kernel takes 32 bits.
    pub fn number(&mut self) -> u64 {
        u64::from(*self.register(libc::REG_RAX) as u32)
    }

    /// The arguments of the call.
    pub fn args(&mut self) -> [u64; 6] {
        ARGS.map(|number| *self.register(number))
    }

    /// The call gets other arguments.
    pub fn set_args(&mut self, args: &[u64; 6]) {
        ARGS.iter().zip(args).for_each(|(&number, &value)| *self.register(number) = value);
    }

    /// The call returns `value`.
    pub fn set_result(&mut self, value: i64) {
        *self.register(libc::REG_RAX) = value as u64;
    }

    /// The stack pointer.
    pub fn sp(&mut self) -> u64 {
        *self.register(libc::REG_RSP)
    }

    /// Sets the stack pointer.
    pub fn set_sp(&mut self, sp: u64) {
        *self.register(libc::REG_RSP) = sp;
    }

    /// Where the thread goes on: behind the call.
    pub fn ip(&mut self) -> u64 {
        *self.register(libc::REG_RIP)
    }

    /// The flags of the thread.
    pub fn flags(&mut self) -> u64 {
        *self.register(libc::REG_EFL)
    }

    /// The thread goes on at `address`.
    pub fn set_ip(&mut self, address: u64) {
        *self.register(libc::REG_RIP) = address;
    }

    /// The thread goes on at `address`, with this stack pointer.
    pub fn set_address(&mut self, address: u64, sp: u64) {
        self.set_ip(address);
        self.set_sp(sp);
    }

    /// The signals that are blocked once it goes on.
    pub fn mask(&mut self) -> &mut u64 {
        // SAFETY: as in `register`.
        unsafe { &mut *self.0.byte_add(MASK) }
    }

    /// The state of vector registers, and its length in bytes.
    fn state(&self) -> (u64, usize) {
        /// The offset of a magic number, which the kernel's length of the state follows, and that
        /// number.
        const SAYS: (usize, u32) = (464, 0x4650_5853);
        // SAFETY: as in `register`; the state is none, or has 512 bytes at least.
        unsafe {
            let at = self.0.byte_add(STATE).read();
            let word = |offset: usize| ((at as usize + offset) as *const u32).read_unaligned();
            match at {
                0 => (0, 0),
                _ if word(SAYS.0) == SAYS.1 => (at, word(SAYS.0 + 4) as usize),
                _ => (at, 512),
            }
        }
    }
}

const ARGS: [libc::c_int; 6] =
    [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9];

impl SignalContext {
    /// A copy of the frame for a new thread, on its stack for our code, which begins at `from` and
    /// has `len` bytes: there the call returned 0, and `sp` is the stack pointer. Returns its
    /// address, and the end of the free room below.
    pub fn copy_for_thread(&mut self, (from, len): (u64, u64), sp: u64) -> (u64, u64) {
        let frame = self.copy(from + len);
        let mut copy = SignalContext((frame + 8) as *mut u64);
        copy.set_result(0);
        copy.set_sp(sp);
        // SAFETY: the copy was made just now.
        unsafe { copy.0.byte_add(STACK).cast::<[u64; 3]>().write([from, 0, len]) };
        (frame + 8, frame - 8)
    }

    /// Copies frame and state to below `top`; returns where the frame is.
    pub fn copy(&mut self, top: u64) -> u64 {
        let (state, state_len) = self.state();
        let new_state = (top - state_len as u64) & !63;
        // The alignment of the stack directly after a call.
        let frame = ((new_state - FRAME as u64) & !15) - 8;
        let old = self.0.cast::<u8>().wrapping_sub(8);
        // SAFETY: the frame and the state were put here by the kernel, and lie on our stack; the
        // other one has room for them, as it would have to have without us. They do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(old, frame as *mut u8, FRAME);
            std::ptr::copy_nonoverlapping(state as *const u8, new_state as *mut u8, state_len);
            if state != 0 {
                ((frame + 8 + STATE as u64) as *mut u64).write(new_state);
            }
        }
        frame
    }
}

/// The registers that `defuse_signal` loads when our handler returns.
#[repr(C)]
pub struct HandlerRegisters {
    pub sp: u64,
    /// The base of FS that a static program has.
    pub fs: u64,
    pub handler: u64,
    pub number: u64,
    pub info: u64,
    pub context: u64,
    pub mask: u64,
}

impl HandlerRegisters {
    /// The thread continues as the frame of a finished handler of the program specifies, whose
    /// stack pointer is `sp` at rt_sigreturn(2).
    pub fn return_from(&mut self, sp: u64) {
        self.sp = sp;
    }
}
