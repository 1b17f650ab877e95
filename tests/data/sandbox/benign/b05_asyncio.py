# expect-stdout: "[0, 1, 4]"
# stdin: ""
# profile: bare
import asyncio
async def f(i): await asyncio.sleep(0.01); return i * i
async def main(): print(list(await asyncio.gather(*(f(i) for i in range(3)))))
asyncio.run(main())
