# Row 44: a mail spool in one directory. Mail is delivered, answered and read.

set $dir=/tmp
set $nfiles=1500000
set $filesize=16k
set $dirwidth=10000000
set $nthreads=16
set $iosize=1m
set $appendsize=16k
set $ops=7000000

define fileset name=data,path=$dir,entries=$nfiles,size=$filesize,dirwidth=$dirwidth,dirgamma=0,prealloc=80

define process name=server,instances=1
{
  thread name=user,memsize=10m,instances=$nthreads
  {
    flowop deletefile name=delete,filesetname=data
    flowop createfile name=create,filesetname=data,fd=1
    flowop appendfilerand name=append-new,iosize=$appendsize,fd=1
    flowop fsync name=sync-new,fd=1
    flowop closefile name=close-new,fd=1
    flowop openfile name=open-to-answer,filesetname=data,fd=1
    flowop readwholefile name=read-to-answer,fd=1,iosize=$iosize
    flowop appendfilerand name=append-answer,iosize=$appendsize,fd=1
    flowop fsync name=sync-answer,fd=1
    flowop closefile name=close-answered,fd=1
    flowop openfile name=open-to-read,filesetname=data,fd=1
    flowop readwholefile name=read,fd=1,iosize=$iosize
    flowop closefile name=close-read,fd=1
    flowop finishoncount name=finish,value=$ops
  }
}

create files
psrun -10
