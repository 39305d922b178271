#!/usr/bin/python3
"""agentenv_shell.py AGENTENVD AGENTENV PROTO_DIR: people at `agentenv shell`, exec -i, --detach, attach and kill,
under a terminal of the test's."""
import fcntl
import hashlib
import os
import pty
import select
import struct
import subprocess
import termios
import time
import unittest

import agentenv_lab as lab


class Base(lab.DaemonTest):
    def setUp(self):
        self.box = self.d.out("start", "bb")

    def restart(self):
        self.d.kill()
        self.d.start()


class Shell(Base):
    """`agentenv shell` at a terminal of the test's."""

    def spawn(self, *args):
        master, slave = pty.openpty()
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
        self.before = termios.tcgetattr(slave)
        p = subprocess.Popen([lab.AGENTENV, "--socket", self.d.socket, "shell", *args], stdin=slave, stdout=slave,
                             stderr=slave, start_new_session=True, close_fds=True,
                             preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        self.slave, self.master, self.seen = slave, master, b""
        self.addCleanup(lambda: [os.close(fd) for fd in (master, slave)])
        return p

    def expect(self, text, timeout=15):
        deadline = time.monotonic() + timeout
        while text not in self.seen:
            self.assertLess(time.monotonic(), deadline, (text, self.seen))
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536)
        self.seen = self.seen[self.seen.index(text) + len(text):]

    def type(self, text):
        os.write(self.master, text)

    def test_a_person_at_a_shell(self):
        p = self.spawn(self.box)
        self.type(b"stty size; echo $((6*7))\n")
        self.expect(b"30 90")
        self.expect(b"42")
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 91, 0, 0))
        self.type(b"trap : WINCH; sleep 0.3; stty size\n")
        self.expect(b"31 91")
        self.type(b"echo go''ing; cat\n")
        self.expect(b"going")
        self.type(b"typed\n")
        self.expect(b"typed\r\ntyped")
        self.type(b"\x03")
        self.expect(b"# ")
        self.type(b"exit 9\n")
        self.assertEqual(p.wait(timeout=15), 9)
        self.assertEqual(termios.tcgetattr(self.slave), self.before, "the terminal is as it was")

    def test_it_goes_on_after_kill_9_and_is_left_and_found(self):
        p = self.spawn(self.box, "--name", "mine")
        self.type(b"x=kept; echo rea''dy\n")
        self.expect(b"ready")
        self.restart()
        self.type(b"echo $x$((6*7))\n")
        self.expect(b"kept42", timeout=30)
        self.type(b"\x1d\x1d\x1d")
        self.expect(b"mine")
        self.assertEqual(p.wait(timeout=15), 0)
        p = self.spawn(self.box, "--name", "mine")
        self.type(b"echo $x$((7*7)); exit\n")
        self.expect(b"kept49")
        self.assertEqual(p.wait(timeout=15), 0)


class Commands(Base):
    def test_standard_input_is_passed_on(self):
        data = os.urandom(3 << 20)
        r = self.d.run("exec", "-i", self.box, "sh", "-c", "md5sum; exit 4", input=data, binary=True, check=False)
        self.assertEqual((r.returncode, r.stdout[:32].decode(), r.stderr), (4, hashlib.md5(data).hexdigest(), b""))

    def test_a_command_is_left_found_and_killed(self):
        name = self.d.out("exec", "-d", "-t", "1m", self.box, "sh", "-c", "echo begun; sleep 0.5; echo end; exit 3")
        r = self.d.run("attach", self.box, name, check=False)
        self.assertEqual((r.returncode, r.stdout), (3, "begun\nend\n"))
        self.d.run("exec", "-d", "-n", "mine", "-t", "1m", self.box, "sleep", "50")
        self.assertEqual(self.d.run("kill", self.box, "mine", "-s", "sigterm").returncode, 0)
        self.assertEqual(self.d.run("attach", self.box, "mine", check=False).returncode, 128 + 15)
        self.assertEqual(self.d.run("kill", self.box, "mine", "-s", "nosuch", check=False).returncode, 2)

    def test_a_named_command_goes_on_after_kill_9(self):
        p = subprocess.Popen([lab.AGENTENV, "--socket", self.d.socket, "exec", "-n", "job", self.box, "sh", "-c",
                              "for i in $(seq 40); do echo $i; sleep 0.05; done; exit 6"],
                             stdout=subprocess.PIPE, text=True)
        self.assertEqual(p.stdout.readline(), "1\n")
        self.restart()
        out, _ = p.communicate(timeout=60)
        self.assertEqual((p.returncode, out.split()), (6, [str(i) for i in range(2, 41)]))


if __name__ == "__main__":
    lab.main()
