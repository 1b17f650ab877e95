# expect: alarms are not relied upon
# check: timeout
import signal
signal.signal(signal.SIGALRM, lambda *a: None); signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: pass
