// Compares a call that concerns no files with one that is dispatched by a signal.
package main

import (
	"fmt"
	"os"
	"syscall"
	"time"
)

func main() {
	const count = 20000
	measure := func(number, length uintptr) time.Duration {
		best := time.Hour
		for round := 0; round < 5; round++ {
			start := time.Now()
			for i := 0; i < count; i++ {
				syscall.RawSyscall6(number, 0, 0, 0, length, 0, 0)
			}
			if took := time.Since(start); took < best {
				best = took
			}
		}
		return best
	}
	passed := measure(syscall.SYS_GETPPID, 0)
	dispatched := measure(syscall.SYS_RT_SIGPROCMASK, 8)
	fmt.Println(passed*3 < dispatched, passed > 0)
	if syscall.Getppid() != os.Getppid() {
		fmt.Println("another parent")
	}
	os.WriteFile("made", []byte("text"), 0o600)
	text, err := os.ReadFile("made")
	fmt.Println(string(text), err)
}
