// A program without the C library: goroutines on many threads, files, processes and signals.
package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"sort"
	"sync"
	"syscall"
	"time"
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func one(number int) int {
	runtime.LockOSThread()
	defer func() {
		// A thread that was locked and is left so ends with its goroutine.
		if number%2 == 0 {
			runtime.UnlockOSThread()
		}
	}()
	name := fmt.Sprintf("w/%d", number)
	sum := 0
	for round := 0; round < 30; round++ {
		file, err := os.Create(name)
		check(err)
		_, err = file.WriteString(fmt.Sprintf("round %d\n", round))
		check(err)
		_, err = file.Seek(0, io.SeekStart)
		check(err)
		text, err := io.ReadAll(file)
		check(err)
		sum += len(text)
		check(file.Close())
		check(os.Rename(name, name+"x"))
		check(os.Rename(name+"x", name))
		info, err := os.Stat(name)
		check(err)
		sum += int(info.Size())
	}
	return sum
}

func main() {
	if len(os.Args) > 1 {
		text, err := os.ReadFile(os.Args[1])
		check(err)
		fmt.Printf("child %q\n", text)
		return
	}
	check(os.MkdirAll("w/deep/er", 0o755))
	check(os.WriteFile("w/deep/er/f", bytes.Repeat([]byte("0123456789"), 1000), 0o644))
	check(os.Symlink("deep", "w/link"))
	// The library waits by a thread of its own.
	locked, err := os.Open("w/deep/er/f")
	check(err)
	check(syscall.Flock(int(locked.Fd()), syscall.LOCK_EX))
	check(syscall.Flock(int(locked.Fd()), syscall.LOCK_UN))
	check(locked.Close())
	count := 0
	check(filepath.WalkDir("w", func(path string, entry os.DirEntry, err error) error {
		count++
		fmt.Println(path, entry.Type())
		return err
	}))
	fmt.Println(count)

	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	caught := 0
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-signals:
				caught++
			case <-stop:
				return
			}
		}
	}()
	go func() {
		for round := 0; round < 50; round++ {
			syscall.Kill(os.Getpid(), syscall.SIGUSR1)
			time.Sleep(time.Millisecond)
		}
	}()

	sums := make([]int, 24)
	var wait sync.WaitGroup
	for number := range sums {
		wait.Add(1)
		// As an argument: before Go 1.22 all rounds have one variable.
		go func(number int) {
			defer wait.Done()
			sums[number] = one(number)
		}(number)
	}
	wait.Wait()
	fmt.Println(sums)
	close(stop)
	<-done
	fmt.Println(caught > 0)

	entries, err := os.ReadDir("w")
	check(err)
	names := []string{}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	sort.Strings(names)
	fmt.Println(names)

	own, err := os.Executable()
	check(err)
	check(os.WriteFile("f", []byte("from the parent"), 0o600))
	for round := 0; round < 5; round++ {
		out, err := exec.Command(own, "f").CombinedOutput()
		check(err)
		os.Stdout.Write(out)
	}
	out, err := exec.Command("sh", "-c", "cat f; cd w; pwd | sed 's,.*/,,'; exit 3").CombinedOutput()
	fmt.Printf("%q %v\n", out, err)
	_, err = os.Open("not/there")
	fmt.Println(err, os.IsNotExist(err))
	func() {
		defer func() { fmt.Println("recovered:", recover()) }()
		var nothing *int
		*nothing = 1
	}()
	runtime.GC()
	check(os.RemoveAll("w"))
	_, err = os.Stat("w")
	fmt.Println(os.IsNotExist(err), filepath.Base(os.Args[0]) != "")
}
